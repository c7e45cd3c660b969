"""The ingest stage: two passes over the logs in blocks, memory bounded by the block size and the vocabularies.

Pass 1 parses, splits and counts; pass 2 transforms and writes. Everything in between is exact and
independent of order, so the dataset's bytes depend on the logs and the configuration alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import Any

import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import IngestConfig
from pipeline.errors import ArtifactError, DataError
from pipeline.ingest import days, history, synthetic, table_specs
from pipeline.ingest.blocks import CountJob, TransformJob
from pipeline.ingest.delayed_labels import corrected_rows
from pipeline.ingest.delivered import SOURCES, compared, without_folders
from pipeline.ingest.engines import IngestEngine, LocalEngine
from pipeline.ingest.file_source import block_bytes, file_sources
from pipeline.ingest.find_repeats import FoundRepeats, find_repeats
from pipeline.ingest.histories.build import BuiltHistories, build_histories
from pipeline.ingest.histories.event_store import marks as history_marks
from pipeline.ingest.output import joined, narrowed_groups, write_frame
from pipeline.ingest.parse import DayRule
from pipeline.ingest.quality import Alone, distribution, verdict
from pipeline.ingest.rawfiles import find_files, missing_data
from pipeline.ingest.rejects import Quarantine
from pipeline.ingest.schema import DataSpec, data_spec
from pipeline.ingest.sources import FrameSource, Source, answering
from pipeline.ingest.state import continued_state, dataset_schema, make_profile, transforms_json
from pipeline.ingest.statistics_pass import Fit
from pipeline.ingest.time_split import find_cut
from pipeline.ingest.times import TimeSplit
from pipeline.ingest.transform_pass import FittedState
from pipeline.ingest.validation import RejectCounts, check_day, check_kept, held
from pipeline.records.dataset import EVENTS, RAW, TRANSFORMS, UNSEEN, VALIDATION
from pipeline.specs.connector import Snapshot
from pipeline.specs.id_mapping import FittedMapping, FittingDay
from pipeline.store.artifacts import Draft, Store

QUALITY = "quality.json"
OTHER_DAYS = "rows of other days"  # where they are, for the split by place: the same in a range and day by day
log = logging.getLogger(__name__)


def raw_fingerprint(data: DataConfig, store: Store | None = None) -> str:
    """Fingerprint of the input data; DataError if nothing exists at ``data.path``.

    ``store``: where the late rows lie that datasets of other days keep for ``data.day``.
    """
    if data.format == "synthetic":
        return "-".join([synthetic.VERSION, *history_marks(store, data)])
    if data.format == "tables":
        return table_specs.VERSION
    with answering(data.path, store):
        mark = days.day_fingerprint(data, store)
        others = history.marks(data, store) if mark else []
        others += history_marks(store, data) if mark else []
        mark += days.LATE + "-".join(others) if others else ""
    if not mark:
        if data.has_file_per_day:
            days.require_complete(data)
        raise missing_data(data.path or "")
    return mark


def ingest(
    data: DataConfig, settings: IngestConfig, seed: int, draft: Draft, now: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Write the dataset of ``data`` into ``draft``; returns the artifact's summary (rows, bytes, rows/s).

    ``seed``: of synthetic logs and of mappings whose fit is random. ``now``: the clock in seconds, for rows/s and for
    when progress is due.

    Raises DataError for input that is missing, incomplete, empty or not what the schema says, ConfigError for a schema
    that contradicts itself.
    """
    if data.format == "tables":
        return table_specs.write(data, draft)
    started = now()
    spec = data_spec(data)
    raw = draft.config.get("raw")
    with answering(data.path, draft.store), compared(data, draft.store, raw) as sources:
        snapshot = days.snapshot_of(data, raw)
        days.require_complete(data, snapshot=snapshot)
        with engine_of(settings) as engine:
            try:
                with ExitStack() as stack:
                    run = _IngestRun(data, settings, seed, draft, spec, engine, stack, now, snapshot)
                    for day in data.days or (None,):
                        run.add(day)
                    run.train_again()
                summary = run.finish()
            except (DataError, FileNotFoundError):  # of logs that changed, which is then the reason to tell
                if snapshot is None:
                    _check_unchanged(data, draft)
                raise
        if snapshot is None:  # a snapshot cannot change
            _check_unchanged(data, draft)
        if (record := sources.record()) is not None:
            draft.write_json(SOURCES, record)
    return {**summary, "rows_per_s": round(summary["rows"] / max(now() - started, 1e-9), 1)}


def _check_unchanged(data: DataConfig, draft: Draft) -> None:
    raw = draft.config.get("raw")
    if raw is None or without_folders(raw) == raw_fingerprint(data, draft.store):
        return
    raise DataError(
        f"the logs of {data.day or data.path} changed while they were read",
        hint="run the same command once all of them are delivered; data.watermark.success=_SUCCESS waits for that",
    )


class _IngestRun:
    """One ingestion: days (or the whole log) one after the other into one dataset, each with the state before it."""

    def __init__(
        self,
        data: DataConfig,
        settings: IngestConfig,
        seed: int,
        draft: Draft,
        spec: DataSpec,
        engine: IngestEngine,
        stack: ExitStack,
        now: Callable[[], float],
        snapshot: Snapshot | None = None,
    ) -> None:
        self.data, self.seed, self.draft, self.spec, self.now = data, seed, draft, spec, now
        self.settings = narrowed_groups(settings, 1 + sum(f.width for f in spec.dense) + len(spec.sparse))
        self.engine, self.snapshot, self.days = engine, snapshot, data.days
        if self.days and self._is_test(self.days[0]):
            raise DataError(
                f"all {len(self.days)} days of data.day={data.day} are test days, expected train days before",
                hint="data.split.test_days=1, or a longer data.day",
            )
        self.quarantine = Quarantine(stack.enter_context(draft.open("quarantine.jsonl")))
        self.splits = ("train", VALIDATION, "test") if data.split.validates else ("train", "test")
        kept = (*self.splits, RAW, UNSEEN, *((EVENTS,) if history.keeps_events(data) else ()))
        self.writers = {folder: stack.enter_context(engine.writer(draft, folder, self.settings)) for folder in kept}
        self.state = self._continued(data.mapping_from) if data.mapping_from else None
        self.alone = Alone(spec)
        self.against, self.before = self._before()  # what this log is compared with
        self.total: Fit | None = None
        self.bytes = 0
        self.dropped = 0
        self.late: dict[int, dict[date | None, list[pl.DataFrame]]] = {}  # by their day and the one they came with
        self.by_place: list[str] = []
        self.repeats: FoundRepeats | None = None
        self.histories: BuiltHistories | None = None
        self.cut: TimeSplit | None = None
        self.kept_events = history.Digest()
        self.again: dict[int, int] = {}
        self.replaces = days.replaced(draft.store, data, draft.key)
        if self.replaces is not None:
            again = self.replaces.config.get("raw") != draft.config.get("raw")
            why = "was delivered again" if again else "is ingested with other settings"
            log.info("%s %s: the new dataset will replace %s", data.day, why, self.replaces.path)

    def _continued(self, path: str) -> FittedState:
        store = self.draft.store
        if store.find(path) is None:
            near = days.previous_dataset(store, self.data.name, self.days[0]) if self.days else None
            raise ArtifactError(
                f"data.mapping_from={path} is not a dataset in store {store.url}",
                hint=f"data.mapping_from={near.path if near else 'null, or datasets/<name>/<day before>/<key>'}",
            )
        return self.engine.continued(continued_state(store, path, self.spec))

    def add(self, day: date | None) -> None:
        number = None if day is None else days.day_number(day)
        first = days.day_number(self.days[0]) if self.days else 0
        shown = f"{day}: " if len(self.days) > 1 else ""
        if self.spec.event_key is not None and self.repeats is None:
            self.repeats = find_repeats(self.engine, self.data, self.draft.store, self.spec, self._log_sources)
        if self.data.split.by == "time" and self.cut is None:
            self.cut = self._find_cut()
        if self.spec.histories and self.histories is None:
            self.histories = build_histories(
                self.engine, self.data, self.draft, self.spec, self._events_sources, self.settings.compression
            )
        fit, counts = self._first_pass(day, f"{shown}pass 1 of 2")
        repeated = self.repeats.judged.repeated.get(number or 0, 0) if self.repeats is not None else 0
        check_day(fit, self.quarantine, self.data, day, counts, repeated)
        if fit.fits:
            self.engine.leaks(self.alone, fit.first_test_day)
            fitting = FittingDay(
                day=number,
                first_day=first,
                features=self.spec.sparse,
                seed=self.seed,
                sample=self.engine.sample(fit.first_test_day),
            )
            self.state = self.engine.fitted(self.spec, fit, self.state, fitting)
        if self.total is None:
            self.total = fit
        else:
            self.total.merge(fit)
        if day is None or day == self.days[-1]:
            self._finalize()
        self._second_pass(fit, number, _RateReporter(f"{shown}pass 2 of 2", self.now, sum(fit.rows.values())))
        self.engine.end_day()

    def _finalize(self) -> None:
        # Have all counts ready for the checks, and the mappings written: no later day changes either.
        assert self.total is not None and self.state is not None
        features = self.before["features"] if self.before else {}
        self.engine.finalize(self.total.train, self.state, self.alone, features)
        continued = bool(self.days) or self.data.mapping_from is not None
        self.engine.write_mappings(self.draft, self.spec, self.state, self.settings.compression, continued=continued)

    def _find_cut(self) -> TimeSplit | None:
        cut = find_cut(
            self.engine, self.data, self.spec, self._events_sources, lambda day: day_rule(self.data, day, self.days)
        )
        if cut is None:
            return None
        told = cut.to_json()
        gap = "" if cut.train_until == cut.test_from else f", train rows those before {told['train_until']}"
        log.info("split by time: test rows are those from %s on%s", told["test_from"], gap)
        return cut

    def _is_test(self, day: date | None) -> bool | None:
        # Whether all rows of `day` are test rows, or none; None where that depends on the row.
        split = self.data.split
        if day is None or split.by in ("hash", "time"):
            return None
        if split.by == "hours":
            return None if day == self.days[-1] else False
        return day in self.days[-split.test_days :]

    def _first_pass(self, day: date | None, what: str) -> tuple[Fit, RejectCounts]:
        # Count the logs of `day`; a second time if they show that the split must go by place.
        # Rows of no day are in quarantine once, however many days of one log are read.
        job = CountJob(self.spec, day_rule(self.data, day, self.days), self._is_test(day), cut=self.cut)
        sources, meter = self._sources(day), _RateReporter(what, self.now)
        counts = RejectCounts()
        for counted in self.engine.count(sources, job):
            of_day = [each for each in counted.rejects if each.of_day]
            counts.add(len(of_day), len(counted.rejects) - len(of_day), counted.dropped)
            self.quarantine.add(counted.file, counted.rejects if self.total is None else of_day)
            for other, rows in counted.other_days.items():
                self.late.setdefault(other, {}).setdefault(day, []).append(rows)
            self.dropped += counted.dropped
            self.bytes += counted.bytes
            meter.add(counted.rows)
        fit = self.engine.fit()
        if not fit.needs_places:
            return fit, counts
        contents = f"{fit.contents.rows:,} rows have {fit.contents.distinct:,} distinct contents"
        log.info(
            "%s: %s, and most rows repeat. They are counted again, split by file and row number instead of by content",
            what,
            contents,
        )
        self.by_place.append(str(day or "all"))
        meter = _RateReporter(f"{what}, again", self.now)
        for counted in self.engine.count(sources, replace(job, by_place=True)):
            meter.add(counted.rows)
        return self.engine.fit(), counts

    def _sources(self, day: date | None) -> list[Source]:
        # The sources of the log's blocks, of `day` if it has files of its own; counts their bytes on disk.
        sources, size = self._log_sources(day, self.spec)
        self.bytes += size
        sources = self._without_repeats(day, sources)
        if self.histories is not None:
            sources = self.histories.added(day, sources)
        if day is not None:
            early = self.late.pop(days.day_number(day), {})
            sources += [
                FrameSource(joined(parts), f"rows in files of {before}", OTHER_DAYS) for before, parts in early.items()
            ]
        return sources

    def _events_sources(self, day: date | None, spec: DataSpec) -> list[Source]:
        return self._without_repeats(day, self._log_sources(day, spec)[0])

    def _without_repeats(self, day: date | None, sources: list[Source]) -> list[Source]:
        return sources if self.repeats is None else self.repeats.marked(day, sources)

    def _log_sources(self, day: date | None, spec: DataSpec) -> tuple[list[Source], int]:
        # What was delivered for `day` (or all there is) and the late rows of it that other datasets keep; bytes.
        sources, size = self._delivered(day, spec)
        store = self.draft.store
        for artifact, name in days.late_files(self.data, store, day) if day is not None else ():
            with store.open(f"{artifact.path}/{name}") as source:
                rows = pl.read_parquet(source.read()).select(list(spec.columns))
            sources.append(FrameSource(rows, f"late rows in {artifact.path}", OTHER_DAYS))
        return sources, size

    def _delivered(self, day: date | None, spec: DataSpec) -> tuple[list[Source], int]:
        if self.data.format == "synthetic":
            return [synthetic.source_of(self.data, self.seed, day, self.settings.block_mib)], 0
        if self.snapshot is not None:
            size = block_bytes(self.settings.block_mib, self.spec)
            return [*self.snapshot.sources(day, spec, size)], self.snapshot.delivery(day).bytes
        files = find_files(days.path_of(self.data, day))
        return [*file_sources(self.data, spec, files, self.settings.block_mib, self.spec)], files.bytes

    def _second_pass(self, fit: Fit, number: int | None, meter: _RateReporter) -> None:
        assert self.state is not None
        job = TransformJob(self.spec, self.state, fit.first_test_day)
        for rows, events in self.engine.write(job, self.writers):
            if events is not None:
                own = events if self.spec.has_day else events.with_columns(day=pl.lit(number, pl.Int32))
                self.writers[EVENTS].add(own)
                self.kept_events.add(own)
            meter.add(rows)

    def finish(self) -> dict[str, Any]:
        assert self.total is not None and self.state is not None
        data, settings, draft, rows = self.data, self.settings, self.draft, self.total.rows
        again = self.again
        writers = {split: self.writers[split] for split in self.splits}
        written = {split: writer.rows for split, writer in writers.items()}
        left_out = rows["train"] - written["train"] + sum(again.values())
        check_kept(written["train"], self.total, data)
        files = {split: writer.files for split, writer in writers.items()}
        groups = {split: writer.groups for split, writer in writers.items()}
        quality = self._quality(self.against, self.before)
        draft.write_json(TRANSFORMS, transforms_json(self.spec, self.state))
        kept = {day: joined([each for parts in came.values() for each in parts]) for day, came in self.late.items()}
        built = [plan.name for plan in self.spec.histories]  # those of late rows are built with their own day
        for day, frame in sorted(kept.items()):
            write_frame(draft, days.late_name(days.day_of(day)), frame.drop(built), settings.compression)
        draft.write_json("schema.json", dataset_schema(self.spec, self.state, written, files, groups).to_json())
        draft.write_json(QUALITY, quality)
        profile = make_profile(self.spec, self.total, self.state)
        draft.write_json("profile.json", profile.to_json())
        late = {days.day_of(day): frame.height for day, frame in sorted(kept.items())}
        for other, count in late.items():
            taken = f": data.day={other} ingests them" if len(self.days) == 1 else f" in {days.late_name(other)}"
            log.info("%s rows of %s kept for that day%s", f"{count:,}", other, taken)
        replaced = {name: fitted.replaced for name, fitted in self._tables.items() if fitted.replaced}
        for name, count in replaced.items():
            log.info(
                "feature %r: all %s rows of its table are in use; the %s coldest went to ids that are looked up more",
                name,
                f"{self.state.sparse[name].rows:,}",
                f"{count:,}",
            )
        repeated = self.repeats.judged if self.repeats is not None else None
        seen = sum(rows.values()) + self.total.gap.rows + self.quarantine.rows + sum(late.values())
        seen += sum(repeated.repeated.values()) if repeated is not None else 0
        return {
            "rows": seen,
            "rows_train": written["train"],
            "rows_test": rows["test"],
            **({"rows_left_out": left_out} if data.sampling.negatives is not None else {}),
            **({"rows_validation": rows[VALIDATION]} if VALIDATION in rows else {}),
            **({"split_time": self.cut.to_json(), "rows_gap": self.total.gap.rows} if self.cut is not None else {}),
            "rows_quarantined": self.quarantine.rows,
            "bytes_in": self.bytes,
            "warnings": quality["checks"]["warnings"],
            "reasons": dict(self.quarantine.kinds.most_common(3)),
            "split_by_place": self.by_place,
            "rows_replaced": replaced,
            **(
                {}
                if repeated is None
                else {
                    "rows_repeated": sum(repeated.repeated.values()),
                    "rows_relabelled": history.counted(repeated.corrected),
                    "rows_corrected": history.counted(again),
                    "events": str(self.kept_events),
                    **history.age(draft.store, data),
                }
            ),
            **({"snapshot": self.snapshot.version} if self.snapshot is not None else {}),
            **(
                {"sequences": {name: each.to_json() for name, each in profile.sequences.items()}}
                if profile.sequences
                else {}
            ),
            **self._about_days({str(day): count for day, count in late.items()}),
        }

    @property
    def _tables(self) -> dict[str, FittedMapping]:
        assert self.state is not None
        return {feature.name: self.state.sparse[feature.name] for feature in self.spec.owners}

    def train_again(self) -> None:
        if self.repeats is None:
            return
        assert self.state is not None
        store = self.draft.store
        for day, events in self.repeats.judged.late.items():
            write_frame(self.draft, history.corrected_name(days.day_of(day)), events, self.settings.compression)
            dataset = history.former_dataset(store, self.data, day)
            assert dataset is not None
            rows = corrected_rows(store, dataset, events, day, self.spec, self.state)
            if rows is not None and rows.height:
                self.writers["train"].add(rows)
                self.again[day] = rows.height
            log.info(
                "%s: %s clicks came later, %s of them in train rows, which are trained on once more",
                days.day_of(day),
                f"{events.height:,}",
                f"{self.again.get(day, 0):,}",
            )

    def _quality(self, against: str | None, before: dict[str, Any] | None) -> dict[str, Any]:
        assert self.total is not None
        now = distribution(self.spec, self.total)
        checked = verdict(self.spec, self.total, self.alone, self.data.checks, now, against, before)
        for line in checked.warnings:
            log.warning("%s", line)
        if checked.held:
            raise held(checked, self.data)
        rows = self.quarantine.rows + sum(self.total.rows.values()) + self.total.gap.rows
        quarantine = {
            "rows": self.quarantine.rows,
            "share": self.quarantine.rows / rows,
            "reasons": dict(self.quarantine.kinds.most_common()),
            "columns": {name or "(the line)": count for name, count in self.quarantine.columns.most_common()},
        }
        return {"quarantine": quarantine, "checks": checked.to_json(), "distribution": now}

    def _before(self) -> tuple[str | None, dict[str, Any] | None]:
        # Path and distribution of the dataset whose mappings continue, else of that of the newest day before.
        data, store = self.data, self.draft.store
        dataset = store.find(data.mapping_from) if data.mapping_from else None
        if dataset is None and self.days:
            dataset = days.previous_dataset(store, data.name, self.days[0])
        if dataset is None or QUALITY not in dataset.files:
            return None, None
        return dataset.path, store.read_json(f"{dataset.path}/{QUALITY}")["distribution"]

    def _about_days(self, late: dict[str, int]) -> dict[str, Any]:
        if not self.days or self.state is None:
            return {}
        freed = {name: fitted.freed_rows for name, fitted in self._tables.items()}
        return {
            "day": self.data.day,
            "rows_late": late,
            "rows_other_days": self.dropped,
            "rows_freed": {name: count for name, count in freed.items() if count},
            "replaces": self.replaces.path if self.replaces is not None else None,
        }


def day_rule(data: DataConfig, day: date | None, named: Sequence[date] = ()) -> DayRule | None:
    """The rule for rows of other days: in files of one day ``data.late`` decides, else they are left out.

    ``named``: all days of the dataset. Late rows of these belong to the day that brings them, early rows to their own.
    """
    if day is None:
        return None
    others = "drop" if not data.has_file_per_day else "keep" if data.late == "own_day" else "quarantine"
    first = days.day_number(named[0]) if named else None
    return DayRule(day=days.day_number(day), others=others, reach=data.late_days, first=first)


def engine_of(config: IngestConfig) -> IngestEngine:
    """The engine that ``ingest.engine`` names. ConfigError where it is not installed."""
    if config.engine == "ray":
        from pipeline.ingest.ray_engine import RayEngine

        return RayEngine(config)
    return LocalEngine()


class _RateReporter:
    """Reports rows, of ``total`` where that is known, and rows per second about once a second."""

    def __init__(self, what: str, now: Callable[[], float], total: int | None = None) -> None:
        self.what, self._now = what, now
        self.of = "" if total is None else f" of {total:,}"
        self.rows = 0
        self.started = self.reported = now()

    def add(self, rows: int) -> None:
        self.rows += rows
        now = self._now()
        if now - self.reported >= 1.0:
            self.reported = now
            rate = self.rows / (now - self.started)
            log.info("%s: %s rows, %s rows/s", self.what, f"{self.rows:,}{self.of}", f"{rate:,.0f}")
