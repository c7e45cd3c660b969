"""Ingestion by Ray: parts of a log are counted, transformed and written wherever Ray has room.

What grows with the rows stays with the workers. Typed rows lie in Ray's object store between the passes (it spills to
disk by itself); counts of ids go to the worker that merges their range of hashes; mappings are fitted, and row groups
and files written, by workers. The driver deals the parts out, merges sums, and names the files. Everything happens in
the order of the parts, so the dataset is the same as out of the local engine.
"""

from __future__ import annotations

import io
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl

from pipeline.config.ingest import IngestConfig
from pipeline.core.errors import ConfigError, LaunchError, NightjarError
from pipeline.ingest.blocks import Counted, CountJob, TransformJob, train_rows
from pipeline.ingest.engines import IngestEngine, Numbering
from pipeline.ingest.quality import LabelLeakCounts
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.state import fitted_dense
from pipeline.ingest.statistics_pass import Partial, SplitCounts
from pipeline.ingest.transform_pass import FittedState
from pipeline.plugins.ray import work
from pipeline.records.dataset import EVENTS
from pipeline.specs.id_mapping import Counts, FittedMapping, FittingDay
from pipeline.store.artifacts import Draft

CALL_SECONDS = 10
LOOPBACK = "127.0.0.1"
# Parts in flight for each core.
AHEAD = 3
# A separate process merges each range of hashes, and takes a core one second to start. The counts from four cores keep
# it busy for a quarter of the time.
CORES_PER_RANGE = 4
MOST_RANGES = 64
# Ray's own output is off, and Polars gets one thread, since there is a task on each core.
INIT_OPTIONS: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "runtime_env": {"env_vars": {"POLARS_MAX_THREADS": "1"}},
}


class RayEngine(IngestEngine):
    """Runs on a Ray of this machine's cores, which it starts and stops, or on the one at ``ingest.ray.address``."""

    def __init__(self, config: IngestConfig) -> None:
        super().__init__()
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"ingest.engine is ray, but Ray cannot be imported: {error}",
                hint="pip install 'nightjar[ray]', or ingest.engine=local",
            ) from None
        self._ray: Any = ray
        if not ray.is_initialized():
            _connect(ray, config.ray.address)
            self.callback(ray.shutdown)
        self._cores = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        merger: Any = self._ray.remote(work.Merger).options(num_cpus=0)
        self._mergers = [merger.remote() for _ in range(min(-(-self._cores // CORES_PER_RANGE), MOST_RANGES))]
        for each in self._mergers:
            self.callback(ray.kill, each)
        self._remote: dict[Callable[..., Any], Any] = {}
        self._numbering = Numbering()
        # References to what the workers keep: the typed rows of every part, with their numbers in ``_kept``, and for
        # each table the fitted mapping, what pass 2 needs of it, and the hashes of its ids.
        self._typed: list[Any] = []
        self._kept: list[int] = []
        self._fitted: dict[str, Any] = {}
        self._tables: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._no_hashes = ray.put(pl.Series([], dtype=pl.UInt64))
        # Results that workers compute beside pass 2, and the driver's objects that get them in ``end_day``.
        self._alone: Any = None
        self._looking: tuple[LabelLeakCounts, Any] | None = None
        self._answering: list[tuple[RemoteCounts, Any]] = []
        self._areas: tuple[LabelLeakCounts, Any] | None = None
        self._writing: tuple[Draft, list[Any]] | None = None

    def parts(self, source: Source) -> Sequence[Source]:
        return source.parts()

    def map_blocks(
        self, parts: Sequence[Source], work_on: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        # Put this into the object store once, since every part needs it. Tasks start only as the generator is read.
        look_at, shared = self._task(work.look_at), self._ray.put(work_on)
        for number, frames in enumerate(self._ahead(look_at(part, shared) for part in parts)):
            for data in self._get(frames):
                yield number, pl.read_ipc(io.BytesIO(data))

    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Run pass 1; typed rows and counts of ids stay with Ray."""
        # Number parts over all sources, since these numbers give the order of the dataset's rows.
        parts = self._numbering.start([part for source in sources for part in source.parts()])
        self._typed, self._kept = [], []
        shared = self._ray.put(job)
        for merger in self._mergers:
            merger.begin.remote(shared)
        ranges = len(self._mergers)
        count_part = self._task(work.count_part, 2 + ranges)
        merged: deque[list[Any]] = deque()
        counts = ((part, count_part(part, shared, ranges)) for part in parts)
        for number, (part, (counted, typed, *shares)) in enumerate(self._ahead(counts)):
            blocks = self._get(counted)
            merged.append([merger.merge.remote(share) for merger, share in zip(self._mergers, shares, strict=True)])
            # A merger that falls behind would fill the object store with shares.
            if len(merged) > AHEAD * self._cores:
                self._get(merged.popleft())
            self._typed.append(typed)
            self._kept.append(sum(block.kept for block in blocks))
            for block in blocks:
                yield self._numbering.numbered(number, part, block)
        for merging in merged:
            self._get(merging)

    def split_counts(self) -> SplitCounts:
        split_counts: SplitCounts = self._get(self._mergers[0].figures.remote())
        split_counts.train.counts = {feature.name: RemoteCounts() for feature in split_counts.spec.sparse}
        return split_counts

    def count_label_leaks(self, alone: LabelLeakCounts, first_test_day: int) -> None:
        """Count ids that give the label away, while others fit and transform; who has which stays with a worker."""
        if alone.enough:
            return
        # These counts grow with the ids, so they pass from task to task, day by day, and never come to the driver.
        if self._alone is None:
            self._alone = self._ray.put(alone)
        self._alone, looked = self._task(work.look_alone, 2)(self._alone, first_test_day, self._typed)
        self._looking = alone, looked

    def sample(self, first_test_day: int) -> Callable[[], Iterable[pl.DataFrame]]:
        return partial(_sample_rows, list(self._typed), first_test_day)

    def fit_state(
        self, spec: DataSpec, split_counts: SplitCounts, before: FittedState | None, day: FittingDay
    ) -> FittedState:
        """Fit every table's mapping on a worker; the state has no ids. The day's counts join those before it."""
        # Start all tables before waiting for any: tasks take references to results that are not computed yet.
        fit_mapping, shared, light = self._task(work.fit_mapping, 4), self._ray.put(day), {}
        for feature in spec.owners:
            name = feature.name
            sharing = [column for column in spec.sparse if column.owner == name]
            known = self._known.get(name, self._no_hashes)
            pieces = [merger.counts.remote(sharing, known, all_days=False) for merger in self._mergers]
            mappings = fit_mapping(feature, self._fitted.get(name), shared, known, *pieces)
            self._fitted[name], self._tables[name], light[name], self._known[name] = mappings
        for merger in self._mergers:
            merger.close.remote()
        tables = dict(zip(light, self._get(list(light.values())), strict=True))
        sparse = {column.name: tables[column.owner] for column in spec.sparse}
        return FittedState(dense=fitted_dense(spec, split_counts.train, before), sparse=sparse)

    def continued(self, state: FittedState) -> FittedState:
        """Hand the state of another dataset to the workers, and return the rest, which has no ids."""
        light = {}
        for name, mapping in state.sparse.items():
            # Put three objects, since each task needs only one of them.
            self._fitted[name] = self._ray.put(mapping)
            self._tables[name] = self._ray.put(mapping.applied())
            self._known[name] = self._ray.put(work.hashes_of(mapping))
            light[name] = mapping.told()
        return FittedState(dense=state.dense, sparse=light)

    def writer(self, draft: Draft, folder: str, config: IngestConfig) -> _SplitFiles:
        return _SplitFiles(self, draft, folder, config)

    def write(self, job: TransformJob, writers: Mapping[str, _SplitFiles]) -> Iterator[tuple[int, pl.DataFrame | None]]:
        """Run pass 2 wherever Ray keeps the typed rows, which are then dropped."""
        light = self._ray.put(replace(job, state=FittedState(dense=job.state.dense, sparse={})))
        tables = [self._tables[feature.name] for feature in job.spec.owners]
        transform_part = self._task(work.transform_part, 1 + len(writers))
        # Drop the references here, so that Ray frees the typed rows when pass 2 has ended.
        parts = zip(self._typed, self._kept, strict=True)
        self._typed, self._kept = [], []
        transformed = (transform_part(typed, light, list(writers), *tables) for typed, rows in parts if rows)
        for heights, *rows in self._ahead(transformed):
            counts = self._get(heights)
            events, done = None, 0
            for folder, part, height in zip(writers, rows, counts, strict=True):
                if folder in job.splits:
                    done += height
                # The driver needs the events of histories; all other rows stay with the workers.
                if height and folder == EVENTS:
                    events = work.frame_of(self._get(part))
                elif height:
                    writers[folder].add_part(part, height)
            yield done, events

    def finalize(self, train: Partial, state: FittedState, alone: LabelLeakCounts, then: Mapping[str, Any]) -> None:
        """Ask the workers what checks and profile will ask of the counts."""
        for feature in train.spec.sparse:
            before, known = then.get(feature.name), self._known[feature.owner]
            pieces = [merger.counts.remote([feature], known, before, all_days=True) for merger in self._mergers]
            fitted, missing = self._fitted[feature.owner], train.missing[feature.name]
            counts = train.counts[feature.name]
            assert isinstance(counts, RemoteCounts)
            self._answering.append((counts, self._task(work.answers)(before, fitted, missing, known, *pieces)))
        if self._alone is not None:
            self._areas = alone, self._task(work.areas)(self._alone)

    def write_mappings(
        self, draft: Draft, spec: DataSpec, state: FittedState, compression: str, *, continued: bool
    ) -> None:
        # The workers that hold the mappings write them beside other work; ``end_day`` waits for the files. The draft's
        # copy starts without files, so each task returns only those that it wrote.
        write_mapping, copied, written = self._task(work.write_mapping), replace(draft, files={}), []
        for feature in spec.owners:
            fitted = self._fitted[feature.name]
            written.append(write_mapping(copied, feature, fitted, compression, continued))
        self._writing = draft, written

    def end_day(self) -> None:
        """Wait for the work that ran beside pass 2."""
        if self._looking is not None:
            alone, looked = self._looking
            alone.rows, alone.positives = self._get(looked)
            self._looking = None
        if self._areas is not None:
            alone, areas = self._areas
            alone.areas = self._get(areas)
        answers = self._get([answer for _, answer in self._answering])
        for (counts, _), answer in zip(self._answering, answers, strict=True):
            counts.answers = answer
        if self._writing is not None:
            draft, written = self._writing
            for files in self._get(written):
                draft.files.update(files)

    def _task(self, function: Callable[..., Any], returns: int = 1) -> Callable[..., Any]:
        # Ray sends a function's code to the workers once for every remote function that is made.
        if function not in self._remote:
            self._remote[function] = self._ray.remote(function)
        call: Callable[..., Any] = self._remote[function].options(num_returns=returns).remote
        return call

    def _ahead(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield ``tasks``, which start as they are taken, some of them ahead."""
        # Run only as many as keep the cores busy: the results of all parts at once would fill the object store.
        ahead: deque[Any] = deque()
        for item in tasks:
            ahead.append(item)
            if len(ahead) >= AHEAD * self._cores:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()

    def _get(self, refs: Any) -> Any:
        """Return the values of ``refs``, or raise the original error of Nightjar that a task ended with.

        Raises LaunchError if Ray lost what it cannot make again: a worker that merged counts, or one task too often.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(refs)
        except errors.RayError as error:
            # Every task that waited for a failed task's result wraps its error once more.
            cause: BaseException = error
            while isinstance(cause, errors.RayTaskError) and isinstance(cause.cause, Exception):
                cause = cause.cause
            if isinstance(cause, NightjarError):
                raise cause from None
            if isinstance(cause, errors.RayTaskError) or not isinstance(cause, errors.RayError):
                raise cause from error  # the error's class tells ``answering`` whose error it is
            message = " ".join(str(cause).split())
            raise LaunchError(
                f"Ray lost a worker of the ingestion, or what it had made: {type(cause).__name__}: {message[:400]}",
                hint="run the same command again, it starts anew; workers that die for lack of memory need a smaller "
                "ingest.block_mib or nodes with more memory, those without room for typed rows larger disks",
            ) from error


class RemoteCounts(Counts):
    """Counts that stay with the workers, which have precomputed the ``answers`` that will be needed."""

    def __init__(self) -> None:
        self.answers: work.Answers | None = None

    @property
    def _settled(self) -> work.Answers:
        assert self.answers is not None, "the counts are not settled"
        return self.answers

    @property
    def kind(self) -> str:
        return self._settled.kind

    @property
    def distinct(self) -> int:
        return self._settled.distinct

    def merge(self, other: Any) -> None:
        """Do nothing: the workers add up their days themselves."""

    def curve(self, fitted: FittedMapping, missing: int) -> tuple[list[int], list[float]]:
        return self._settled.curve

    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        return self._settled.distribution

    def shares_of(self, then: Mapping[str, Any]) -> Any:
        return self._settled.shares


class _SplitFiles:
    """The Parquet files of one split: row groups of exact size and files of them, made by workers.

    ``files`` and ``groups`` are complete after ``with``.
    """

    def __init__(self, engine: RayEngine, draft: Draft, folder: str, config: IngestConfig) -> None:
        self._engine, self._draft, self._folder, self._config = engine, draft, folder, config
        self.rows = 0
        self.files: list[str] = []
        self.groups: list[list[int]] = []
        # Parts whose rows [start, stop) have no row group yet, the number of these rows, and the row groups of the next
        # file.
        self._pending: list[tuple[Any, int, int]] = []
        self._waiting = 0
        self._encoded: list[tuple[Any, int]] = []
        self._written: list[Any] = []
        self._encode = engine._task(work.encode_group)
        self._write = engine._task(work.write_file)
        # The draft's files are added here once the workers have reported them.
        self._copied = replace(draft, files={})

    def __enter__(self) -> _SplitFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error the draft is discarded, so nothing has to be finished.
        if kind is not None:
            return
        if self._waiting:
            self._group(self._waiting)
        if self._encoded:
            self._file()
        for files in self._engine._get(self._written):
            self._draft.files.update(files)

    def add(self, frame: pl.DataFrame) -> None:
        self.add_part(self._engine._ray.put(work.bytes_of(frame)), frame.height)

    def add_part(self, part: Any, rows: int) -> None:
        self._pending.append((part, 0, rows))
        self.rows += rows
        self._waiting += rows
        while self._waiting >= self._config.rows_per_group:
            self._group(self._config.rows_per_group)

    def _group(self, rows: int) -> None:
        # Row groups have the same sizes as in the local engine, however the rows were divided into parts: a group may
        # take the end of one part and the beginning of the next.
        parts, spans, left = list[Any](), list[tuple[int, int]](), rows
        while left:
            part, start, stop = self._pending.pop(0)
            cut = min(stop, start + left)
            parts.append(part)
            spans.append((start, cut))
            if cut < stop:
                self._pending.insert(0, (part, cut, stop))
            left -= cut - start
        self._waiting -= rows
        self._encoded.append((self._encode(spans, self._config.compression, *parts), rows))
        if len(self._encoded) == self._config.groups_per_file:
            self._file()

    def _file(self) -> None:
        # A worker writes the file once its row groups are encoded. The driver only names it and sees none of its bytes.
        name = f"{self._folder}/part-{len(self.files):05d}.parquet"
        groups, rows = zip(*self._encoded, strict=True)
        sizes = list(rows)
        self._written.append(self._write(self._copied, name, self._config.compression, sizes, *groups))
        self.files.append(name)
        self.groups.append(sizes)
        self._encoded = []


def _sample_rows(parts: list[Any], first_test_day: int) -> Iterator[pl.DataFrame]:
    import ray

    for part in parts:
        for typed in ray.get(part):
            yield train_rows(typed, first_test_day)


def _connect(ray: Any, address: str | None) -> None:
    """Start a Ray of this machine, or join the one at ``address``; ConfigError if it does not start or answer."""
    if address is None:
        try:
            start_local_ray(ray)
        except (ImportError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            message = f"Ray {ray.__version__} cannot be started on this machine: {error}"
            hint = "ingest.engine=local ingests without Ray; ingest.ray.address=<host>:<port> joins one that runs"
            raise ConfigError(message, hint=hint) from None
        return
    try:
        # Open and close a connection first: Ray itself would try for a minute and a half.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdigit():
            socket.create_connection((host, int(port)), timeout=CALL_SECONDS).close()
        ray.init(address=address, **INIT_OPTIONS)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray answers at ingest.ray.address={address}: {error}",
            hint="ingest.ray.address=null starts one on this machine",
        ) from None


def start_local_ray(ray: Any, **options: Any) -> None:
    """Start a Ray of this machine that listens on its loopback alone.

    Whoever reaches the ports of a Ray runs commands in it.

    Args:
        ray: The module.
        options: More arguments of ``ray.init``.

    Raises:
        ConfigError: This Ray listens on other addresses, too; it has been stopped.
    """
    from ray._private import ray_constants

    # Newer versions replace the loopback address by the machine's address unless clusters are switched off, as they are
    # on macOS. An environment variable controls this, but Ray reads it at import, which may have happened already.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True), False
    try:
        ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **INIT_OPTIONS, **options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
    address = ray.util.get_node_ip_address()
    if address != LOOPBACK:
        ray.shutdown()
        raise ConfigError(
            f"Ray {ray.__version__} listens on {address}, not on {LOOPBACK} alone",
            hint="ingest.engine=local, another version of Ray (2.40 to 2.60 are known to work), or ingest.ray.address="
            "<host>:<port> of a Ray that you guard yourself",
        )
