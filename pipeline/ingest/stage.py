"""The ingest stage: two passes over the logs in blocks, memory bounded by the block size and the vocabularies.

Pass 1 parses, splits and counts; pass 2 transforms and writes. Everything in between is exact and
independent of order, so the dataset's bytes depend on the logs and the configuration alone.

A row goes this way; ``_IngestRun.ingest_day`` has the same steps:

1. A source (``sources``, of files ``file_source``) cuts the log into blocks of rows, and an engine (``engines``) runs
   ``blocks.count`` on each.
2. ``parse.parse`` turns raw rows to typed ones: ids become 64-bit hashes (``ids``), numbers float64.
3. ``statistics_pass.SplitCounts`` sends rows to train, validation or test, and counts those of train.
4. ``state.fitted_state`` fits transforms, and id mappings (``id_mappings``): which hash has which row of a table.
5. ``blocks.transformed`` applies both by ``transform_pass.transform``: from here on, ids are row numbers of tables.
6. ``output.PartWriter`` writes them as row groups, which ``training/parquet.py`` reads.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import Any

import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import IngestConfig
from pipeline.core.errors import ArtifactError, DataError
from pipeline.core.registry import ENGINES, load_hooks
from pipeline.ingest import days, repeats, synthetic, table_specs
from pipeline.ingest.blocks import CountJob, TransformJob
from pipeline.ingest.delayed_labels import corrected_rows
from pipeline.ingest.delivered import SOURCES, compared, without_folders
from pipeline.ingest.engines import IngestEngine, LocalEngine
from pipeline.ingest.file_source import block_bytes, file_sources
from pipeline.ingest.histories import PartHistories, build_histories, history_marks
from pipeline.ingest.output import joined, narrowed_groups, write_frame
from pipeline.ingest.quality import LabelLeakCounts, RejectCounts, check_day, check_kept, distribution, held, verdict
from pipeline.ingest.rawfiles import find_files, missing_data
from pipeline.ingest.repeats import FoundRepeats, find_repeats
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import FrameSource, Source, answering, wrap_sources
from pipeline.ingest.state import continued_state, dataset_schema, make_profile, transforms_json
from pipeline.ingest.statistics_pass import SplitCounts
from pipeline.ingest.time_split import find_cut
from pipeline.ingest.times import TimeSplit
from pipeline.ingest.transform_pass import FittedState
from pipeline.ingest.values import Quarantine
from pipeline.records.dataset import EVENTS, RAW, TRANSFORMS, UNSEEN, VALIDATION
from pipeline.specs.connector import Snapshot
from pipeline.specs.id_mapping import FittingDay
from pipeline.store.artifacts import Draft, Store

QUALITY = "quality.json"
# Place of rows of other days for the split by place: the same in a range and day by day.
OTHER_DAYS = "rows of other days"
log = logging.getLogger(__name__)


def raw_fingerprint(data: DataConfig, store: Store | None = None) -> str:
    """Fingerprint the input data; DataError if nothing exists at ``data.path``.

    ``store``: has the late rows that datasets of other days keep for ``data.day``.
    """
    if data.format == "synthetic":
        return "-".join([synthetic.VERSION, *repeats.event_marks(data, store), *history_marks(store, data)])
    if data.format == "tables":
        return table_specs.VERSION
    with answering(data.path, store):
        mark = days.day_fingerprint(data, store)
        if mark:
            others = [*repeats.event_marks(data, store), *history_marks(store, data)]
            if others:
                mark += days.LATE + "-".join(others)
    if not mark:
        if data.has_file_per_day:
            days.require_complete(data)
        raise missing_data(data.path or "")
    return mark


def ingest(
    data: DataConfig, settings: IngestConfig, seed: int, draft: Draft, now: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Write the dataset of ``data`` into ``draft``; returns the artifact's summary (rows, bytes, rows/s).

    ``seed``: for synthetic logs and for mappings whose fit is random. ``now``: the clock in seconds, for rows/s and for
    when progress is due.

    Raises DataError for input that is missing, incomplete, empty or not what the schema says, ConfigError for a schema
    that contradicts itself.
    """
    if data.format == "tables":
        return table_specs.write(data, draft)
    started = now()
    spec = data_spec(data)
    # Not rows: the fingerprint of the logs that the dataset's key was made of (``raw_fingerprint``).
    raw = draft.config.get("raw")
    with answering(data.path, draft.store), compared(data, draft.store, raw) as sources:
        snapshot = days.snapshot_of(data, raw)
        days.require_complete(data, snapshot=snapshot)
        with engine_of(settings) as engine:
            try:
                # The dataset's files are complete when the stack ends, so only then does `finish` list them.
                with ExitStack() as stack:
                    run = _IngestRun(data, settings, seed, draft, spec, engine, stack, now, snapshot)
                    for day in data.days or (None,):
                        run.ingest_day(day)
                    run.append_corrected_rows()
                summary = run.finish()
            except (DataError, FileNotFoundError):
                # If the logs changed meanwhile, that is the reason to report.
                if snapshot is None:
                    _check_unchanged(data, draft)
                raise
        # A pinned snapshot cannot change.
        if snapshot is None:
            _check_unchanged(data, draft)
        if (record := sources.record()) is not None:
            draft.write_json(SOURCES, record)
    return {**summary, "rows_per_s": round(summary["rows"] / max(now() - started, 1e-9), 1)}


def _check_unchanged(data: DataConfig, draft: Draft) -> None:
    # The dataset's key was made of the logs as they were at the start, so it must not stand for other rows.
    raw = draft.config.get("raw")
    if raw is None or without_folders(raw) == raw_fingerprint(data, draft.store):
        return
    raise DataError(
        f"the logs of {data.day or data.path} changed while they were read",
        hint="run the same command once all of them are delivered; data.watermark.success=_SUCCESS waits for that",
    )


class _IngestRun:
    """One ingestion: days (or the whole log) one after the other into one dataset, each continuing the state."""

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
        self.engine, self.snapshot, self.days = engine, snapshot, data.days
        if self.days and self._is_test(self.days[0]):
            raise DataError(
                f"all {len(self.days)} days of data.day={data.day} are test days, expected train days before",
                hint="data.split.test_days=1, or a longer data.day",
            )
        columns = 1 + sum(feature.width for feature in spec.dense) + len(spec.sparse)
        self.settings = narrowed_groups(settings, columns)
        self.quarantine = Quarantine(stack.enter_context(draft.open("quarantine.jsonl")))
        self.splits = ("train", VALIDATION, "test") if data.split.validates else ("train", "test")
        folders = [*self.splits, RAW, UNSEEN]
        if repeats.keeps_events(data):
            folders.append(EVENTS)
        self.writers = {}
        for folder in folders:
            self.writers[folder] = stack.enter_context(engine.writer(draft, folder, self.settings))
        self.state = None
        if data.mapping_from:
            self.state = self._continued_state(data.mapping_from)
        self.leaks = LabelLeakCounts(spec)
        # The dataset that this log's distribution is compared with.
        self.former_path, self.former_distribution = self._former_distribution()
        self.total: SplitCounts | None = None
        self.bytes = 0
        self.dropped = 0
        # Rows of other days, by their day and then by the day whose files they came with.
        self.late: dict[int, dict[date | None, list[pl.DataFrame]]] = {}
        self.by_place: list[str] = []
        self.repeats: FoundRepeats | None = None
        self.histories: dict[date | None, list[list[PartHistories]]] | None = None
        self.cut: TimeSplit | None = None
        self.kept_events = repeats.EventDigest()
        self.corrected: dict[int, int] = {}
        self.replaces = days.replaced(draft.store, data, draft.key)
        if self.replaces is not None:
            delivered_again = self.replaces.config.get("raw") != draft.config.get("raw")
            why = "was delivered again" if delivered_again else "is ingested with other settings"
            log.info("%s %s: the new dataset will replace %s", data.day, why, self.replaces.path)

    def _continued_state(self, path: str) -> FittedState:
        store = self.draft.store
        if store.find(path) is None:
            nearest = "null, or datasets/<name>/<day before>/<key>"
            if self.days:
                dataset = days.previous_dataset(store, self.data.name, self.days[0])
                if dataset is not None:
                    nearest = dataset.path
            raise ArtifactError(
                f"data.mapping_from={path} is not a dataset in store {store.url}",
                hint=f"data.mapping_from={nearest}",
            )
        return self.engine.continued(continued_state(store, path, self.spec))

    def _former_distribution(self) -> tuple[str | None, dict[str, Any] | None]:
        # Returns path and distribution of the dataset whose mappings continue, else of that of the newest day before.
        data, store = self.data, self.draft.store
        dataset = None
        if data.mapping_from:
            dataset = store.find(data.mapping_from)
        if dataset is None and self.days:
            dataset = days.previous_dataset(store, data.name, self.days[0])
        if dataset is None or QUALITY not in dataset.files:
            return None, None
        return dataset.path, store.read_json(f"{dataset.path}/{QUALITY}")["distribution"]

    def ingest_day(self, day: date | None) -> None:
        """Ingest the logs of ``day``, or (None) the whole log: count, check, fit on the train rows, then write."""
        number = None if day is None else days.day_number(day)
        prefix = f"{day}: " if len(self.days) > 1 else ""

        # 1. Passes that pass 1 depends on, each once for all days: which rows repeat, where a split by time cuts, and
        #    what users did before each row.
        if self.spec.event_key is not None and self.repeats is None:
            self.repeats = find_repeats(self.engine, self.data, self.draft.store, self.spec, self._event_sources)
        if self.data.split.by == "time" and self.cut is None:
            self._find_cut()
        if self.spec.histories and self.histories is None:
            self.histories = build_histories(
                self.engine, self.data, self.draft, self.spec, self._event_sources, self.settings.compression
            )

        # 2. Pass 1: parse, split and count.
        split_counts, reject_counts = self._run_statistics_pass(day, f"{prefix}pass 1 of 2")
        repeated = 0
        if self.repeats is not None:
            repeated = self.repeats.judged.repeated.get(number or 0, 0)
        check_day(split_counts, self.quarantine, self.data, day, reject_counts, repeated)

        # 3. Fit transforms and mappings on the train rows, after those of the day before.
        if split_counts.has_train_rows:
            self.engine.count_label_leaks(self.leaks, split_counts.first_test_day)
            first_day = 0
            if self.days:
                first_day = days.day_number(self.days[0])
            fitting = FittingDay(
                day=number,
                first_day=first_day,
                features=self.spec.sparse,
                seed=self.seed,
                sample=self.engine.sample(split_counts.first_test_day),
            )
            self.state = self.engine.fit_state(self.spec, split_counts, self.state, fitting)
        if self.total is None:
            self.total = split_counts
        else:
            self.total.merge(split_counts)
        assert self.state is not None
        if day is None or day == self.days[-1]:
            # No later day changes counts or mappings, so both are completed while pass 2 goes on.
            features = {}
            if self.former_distribution:
                features = self.former_distribution["features"]
            self.engine.finalize(self.total.train, self.state, self.leaks, features)
            continued = bool(self.days) or self.data.mapping_from is not None
            self.engine.write_mappings(
                self.draft, self.spec, self.state, self.settings.compression, continued=continued
            )

        # 4. Pass 2: transform the typed rows, which the engine has kept from pass 1, and write them to the files of
        #    their splits.
        meter = _RateReporter(f"{prefix}pass 2 of 2", self.now, sum(split_counts.rows.values()))
        job = TransformJob(self.spec, self.state, split_counts.first_test_day)
        for rows, events in self.engine.write(job, self.writers):
            if events is not None:
                # Datasets of later days look up events by day, which no column of these logs tells.
                if not self.spec.has_day:
                    events = events.with_columns(day=pl.lit(number, pl.Int32))
                self.writers[EVENTS].add(events)
                self.kept_events.add(events)
            meter.add(rows)
        self.engine.end_day()

    def _find_cut(self) -> None:
        self.cut = find_cut(self.engine, self.data, self.spec, self._event_sources)
        # None means that no row has a label and a time. Pass 1 raises the error that says why.
        if self.cut is None:
            return
        record = self.cut.to_json()
        gap = ""
        if self.cut.train_until != self.cut.test_from:
            gap = f", train rows those before {record['train_until']}"
        log.info("split by time: test rows are those from %s on%s", record["test_from"], gap)

    def _is_test(self, day: date | None) -> bool | None:
        # Returns whether all rows of `day` are test rows, or none; None if that depends on the row.
        split = self.data.split
        if day is None or split.by in ("hash", "time"):
            return None
        if split.by == "hours":
            # Only the last day of a range is split.
            if day == self.days[-1]:
                return None
            return False
        return day in self.days[-split.test_days :]

    def _run_statistics_pass(self, day: date | None, title: str) -> tuple[SplitCounts, RejectCounts]:
        job = CountJob(self.spec, days.day_rule(self.data, day, self.days), self._is_test(day), cut=self.cut)
        sources, meter = self._sources(day), _RateReporter(title, self.now)
        reject_counts = RejectCounts()
        for counted in self.engine.count(sources, job):
            of_day = [reject for reject in counted.rejects if reject.of_day]
            reject_counts.of_day += len(of_day)
            reject_counts.of_none += len(counted.rejects) - len(of_day)
            reject_counts.of_others += counted.dropped
            # Rows of no known day are quarantined once, with the first day, however many days of one log are read.
            quarantined = counted.rejects
            if self.total is not None:
                quarantined = of_day
            self.quarantine.add(counted.file, quarantined)
            for other_day, rows in counted.other_days.items():
                self.late.setdefault(other_day, {}).setdefault(day, []).append(rows)
            self.dropped += counted.dropped
            self.bytes += counted.bytes
            meter.add(counted.rows)
        split_counts = self.engine.split_counts()
        if not split_counts.needs_places:
            return split_counts, reject_counts

        contents = f"{split_counts.contents.rows:,} rows have {split_counts.contents.distinct:,} distinct contents"
        log.info(
            "%s: %s, and most rows repeat. They are counted again, split by file and row number instead of by content",
            title,
            contents,
        )
        self.by_place.append(str(day or "all"))
        meter = _RateReporter(f"{title}, again", self.now)
        for counted in self.engine.count(sources, replace(job, by_place=True)):
            meter.add(counted.rows)
        return self.engine.split_counts(), reject_counts

    def _sources(self, day: date | None) -> list[Source]:
        # Returns what pass 1 reads of `day`. Adds the files' bytes on disk to the total.
        sources, size = self._log_sources(day, self.spec)
        self.bytes += size
        if self.repeats is not None:
            sources = wrap_sources(day, sources, self.repeats.marks)
        if self.histories is not None:
            sources = wrap_sources(day, sources, self.histories)
        if day is not None:
            # These rows came with files of an earlier day, where both wrappers were applied to them.
            early = self.late.pop(days.day_number(day), {})
            for file_day, parts in early.items():
                sources.append(FrameSource(joined(parts), f"rows in files of {file_day}", OTHER_DAYS))
        return sources

    def _event_sources(self, day: date | None, spec: DataSpec) -> list[Source]:
        # Repeated rows must not be events of histories or count for the split by time.
        sources, _ = self._log_sources(day, spec)
        if self.repeats is None:
            return sources
        return wrap_sources(day, sources, self.repeats.marks)

    def _log_sources(self, day: date | None, spec: DataSpec) -> tuple[list[Source], int]:
        # Returns what was delivered for `day`, or the whole log, with the late rows that other datasets keep for it,
        # and its bytes. Blocks are cut as for the whole schema, so that parts have the same numbers whatever columns
        # are read.
        sources: list[Source]
        if self.data.format == "synthetic":
            sources, size = [synthetic.source_of(self.data, self.seed, day, self.settings.block_mib)], 0
        elif self.snapshot is not None:
            sources = list(self.snapshot.sources(day, spec, block_bytes(self.settings.block_mib, self.spec)))
            size = self.snapshot.delivery(day).bytes
        else:
            files = find_files(days.path_of(self.data, day))
            sources, size = list(file_sources(self.data, spec, files, self.settings.block_mib, self.spec)), files.bytes
        if day is not None:
            store = self.draft.store
            for artifact, name in days.late_files(self.data, store, day):
                with store.open(f"{artifact.path}/{name}") as source:
                    rows = pl.read_parquet(source.read()).select(list(spec.columns))
                sources.append(FrameSource(rows, f"late rows in {artifact.path}", OTHER_DAYS))
        return sources, size

    def append_corrected_rows(self) -> None:
        """Add the train rows of earlier days whose clicks these logs brought, to be trained on once more."""
        if self.repeats is None:
            return
        assert self.state is not None
        late, store = self.repeats.judged.late, self.draft.store
        former = repeats.all_before(store, self.data) if late else {}
        for day, events in late.items():
            write_frame(self.draft, repeats.corrected_name(days.day_of(day)), events, self.settings.compression)
            rows = corrected_rows(store, former[days.day_of(day)], events, day, self.spec, self.state)
            if rows is not None and rows.height:
                self.writers["train"].add(rows)
                self.corrected[day] = rows.height
            log.info(
                "%s: %s clicks came later, %s of them in train rows, which are trained on once more",
                days.day_of(day),
                f"{events.height:,}",
                f"{self.corrected.get(day, 0):,}",
            )

    def finish(self) -> dict[str, Any]:
        """Write everything except the rows; returns the summary without the rate."""
        assert self.total is not None and self.state is not None
        draft, spec, state = self.draft, self.spec, self.state
        written, files, groups = dict[str, int](), dict[str, list[str]](), dict[str, list[list[int]]]()
        for split in self.splits:
            writer = self.writers[split]
            written[split], files[split], groups[split] = writer.rows, writer.files, writer.groups
        check_kept(written["train"], self.total, self.data)
        quality = self._check_quality()
        draft.write_json(TRANSFORMS, transforms_json(spec, state))
        late = self._write_late_rows()
        draft.write_json("schema.json", dataset_schema(spec, state, written, files, groups).to_json())
        draft.write_json(QUALITY, quality)
        profile = make_profile(spec, self.total, state)
        draft.write_json("profile.json", profile.to_json())
        for day, count in late.items():
            where = f" in {days.late_name(day)}"
            if len(self.days) == 1:
                where = f": data.day={day} ingests them"
            log.info("%s rows of %s kept for that day%s", f"{count:,}", day, where)
        tables = {feature.name: state.sparse[feature.name] for feature in spec.owners}
        replaced = {name: fitted.replaced for name, fitted in tables.items() if fitted.replaced}
        for name, count in replaced.items():
            log.info(
                "feature %r: all %s rows of its table are in use; the %s coldest went to ids that are looked up more",
                name,
                f"{state.sparse[name].rows:,}",
                f"{count:,}",
            )
        summary = self._summarize_rows(written, sum(late.values()))
        summary["rows_quarantined"] = self.quarantine.rows
        summary["bytes_in"] = self.bytes
        summary["warnings"] = quality["checks"]["warnings"]
        summary["reasons"] = dict(self.quarantine.kinds.most_common(3))
        summary["split_by_place"] = self.by_place
        summary["rows_replaced"] = replaced
        if self.repeats is not None:
            judged = self.repeats.judged
            summary["rows_repeated"] = sum(judged.repeated.values())
            summary["rows_relabelled"] = repeats.figures_by_day(judged.corrected)
            summary["rows_corrected"] = repeats.figures_by_day(self.corrected)
            summary["events"] = str(self.kept_events)
            summary.update(repeats.label_dates(draft.store, self.data))
        if self.snapshot is not None:
            summary["snapshot"] = self.snapshot.version
        if profile.sequences:
            summary["sequences"] = {name: sequence.to_json() for name, sequence in profile.sequences.items()}
        if self.days:
            summary["day"] = self.data.day
            summary["rows_late"] = {str(day): count for day, count in late.items()}
            summary["rows_other_days"] = self.dropped
            summary["rows_freed"] = {name: fitted.freed_rows for name, fitted in tables.items() if fitted.freed_rows}
            summary["replaces"] = None
            if self.replaces is not None:
                summary["replaces"] = self.replaces.path
        return summary

    def _summarize_rows(self, written: dict[str, int], late: int) -> dict[str, Any]:
        # rows = train - corrected + left out + test + quarantined + repeated + kept for other days
        assert self.total is not None
        rows, gap = self.total.rows, self.total.gap.rows
        total = sum(rows.values()) + gap + self.quarantine.rows + late
        if self.repeats is not None:
            total += sum(self.repeats.judged.repeated.values())
        summary: dict[str, Any] = {"rows": total, "rows_train": written["train"], "rows_test": rows["test"]}
        if self.data.sampling.negatives is not None:
            summary["rows_left_out"] = rows["train"] - written["train"] + sum(self.corrected.values())
        if VALIDATION in rows:
            summary["rows_validation"] = rows[VALIDATION]
        if self.cut is not None:
            summary["split_time"], summary["rows_gap"] = self.cut.to_json(), gap
        return summary

    def _write_late_rows(self) -> dict[date, int]:
        # Histories of late rows are built when their own day is ingested.
        built = [plan.name for plan in self.spec.histories]
        late = {}
        for number, by_file_day in sorted(self.late.items()):
            parts = list(itertools.chain.from_iterable(by_file_day.values()))
            day, frame = days.day_of(number), joined(parts)
            write_frame(self.draft, days.late_name(day), frame.drop(built), self.settings.compression)
            late[day] = frame.height
        return late

    def _check_quality(self) -> dict[str, Any]:
        assert self.total is not None
        today = distribution(self.spec, self.total)
        checked = verdict(
            self.spec, self.total, self.leaks, self.data.checks, today, self.former_path, self.former_distribution
        )
        for line in checked.warnings:
            log.warning("%s", line)
        if checked.held:
            raise held(checked, self.data)
        rows = self.quarantine.rows + sum(self.total.rows.values()) + self.total.gap.rows
        columns = {}
        for name, count in self.quarantine.columns.most_common():
            columns[name or "(the line)"] = count
        quarantine = {
            "rows": self.quarantine.rows,
            "share": self.quarantine.rows / rows,
            "reasons": dict(self.quarantine.kinds.most_common()),
            "columns": columns,
        }
        return {"quarantine": quarantine, "checks": checked.to_json(), "distribution": today}


def engine_of(config: IngestConfig) -> IngestEngine:
    """Return the engine that ``ingest.engine`` names. ConfigError if it is not installed."""
    if config.engine == "local":
        return LocalEngine()
    engine: IngestEngine = load_hooks(ENGINES)[config.engine](config)
    return engine


class _RateReporter:
    """Reports rows, of ``total`` if that is known, and rows per second about once a second."""

    def __init__(self, title: str, now: Callable[[], float], total: int | None = None) -> None:
        self.title, self._now = title, now
        self.of_total = "" if total is None else f" of {total:,}"
        self.rows = 0
        self.started = self.reported = now()

    def add(self, rows: int) -> None:
        self.rows += rows
        now = self._now()
        if now - self.reported >= 1.0:
            self.reported = now
            rate = self.rows / (now - self.started)
            log.info("%s: %s rows, %s rows/s", self.title, f"{self.rows:,}{self.of_total}", f"{rate:,.0f}")
