"""Nightjar from Python, for notebooks: start a run and watch it, look at what runs gave, score frames with a version.

    from pipeline.api import judge, run, runs, load_version

A run is the very command ``nightjar run`` in a process of its own, so a notebook's kernel holds no training.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import EXIT_CODES, ArtifactError, NightjarError
from pipeline.core.units import plural

if TYPE_CHECKING:
    from datetime import date

    import polars as pl

    from pipeline.evaluation.score_files import Table
    from pipeline.records.gate import GateRecord
    from pipeline.records.result import Result

__all__ = ["Run", "Version", "judge", "load_run", "load_version", "run", "runs"]

STORE = "./store"
_STEP = re.compile(r"\bstep +(\d+)/(\d+)\b.*?\bNE (\S+)")
_STAGE = re.compile(r"^(\w+) {2,}\S")
_RUN = re.compile(r"^run ([^:\s]+): .*\(store (.*)\)$")


@dataclass(frozen=True)
class Run:
    """A run in a store, by ``name``. In a notebook it shows its report."""

    name: str
    store: str = STORE

    @property
    def result(self) -> Result:
        """``result.json``: status, figures, artifacts of the stages; ArtifactError where there is none."""
        from pipeline.records.record import read
        from pipeline.records.result import Result

        return read(Result, _store(self.store), f"runs/{self.name}/{Result.FILE}")

    @property
    def metrics(self) -> pl.DataFrame:
        """What training recorded, a row for each interval: step, samples, loss, ne_window, samples_per_s, lr, ..."""
        import polars as pl

        from pipeline.report.records import read_records

        # Types are inferred from all records, because a column may have its first value late.
        return pl.DataFrame(read_records(_store(self.store), self.name), infer_schema_length=None)

    @property
    def gate(self) -> GateRecord | None:
        """What the gate measured and decided; None where the run did not publish."""
        from pipeline.records.gate import GateRecord
        from pipeline.records.record import read

        path = self.result.artifact("publish")
        if path is None:
            return None
        return read(GateRecord, _store(self.store), f"{path}/{GateRecord.FILE}")

    @property
    def page(self) -> str | None:
        """The run's report as one HTML page without scripts; None where there is none."""
        store, path = _store(self.store), f"runs/{self.name}/report.html"
        if not store.exists(path):
            return None
        # Returned as text, because the store may be a bucket that a browser cannot open.
        with store.open(path) as source:
            text: str = source.read().decode()
        return text

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the report, in a frame of its own so that its style stays in it."""
        page = self.page
        if page is None:
            return None
        frame = '<iframe srcdoc="{}" width="100%" height="640" style="border: 0"></iframe>'
        return frame.format(html.escape(page, quote=True))


@dataclass(frozen=True)
class Version:
    """A published version of ``model`` that scores frames."""

    model: str
    version: str
    store: str = STORE
    cache_mib: float = 1024.0

    def score(self, frame: pl.DataFrame, *, labelled: bool = False) -> pl.DataFrame:
        """Predictions for raw rows: ``probability``, and a column for each further task; as many rows as ``frame``.

        ``frame`` has the raw columns that the version was trained on; with ``labelled`` that of the label too. Rows
        that do not parse have nulls, and a warning says why. Memory for table rows: ``cache_mib``. Raises DataError
        where a column is missing, ArtifactError for a damaged version.
        """
        import polars as pl

        from pipeline.serving.prediction import score_file

        blocks: list[pl.DataFrame] = []
        with tempfile.TemporaryDirectory(prefix="nightjar-frame-") as folder:
            path = str(Path(folder, "frame.parquet"))
            frame.write_parquet(path)
            done = score_file(
                _store(self.store),
                self.model,
                self.version,
                path,
                blocks.append,
                cache_mib=self.cache_mib,
                labelled=labelled,
                none_is_error=False,
            )
        if done["rows_rejected"]:
            first = re.sub(r"^\S*frame\.parquet line", "row", done["rejected"][0])
            said = f"{plural(done['rows_rejected'], 'row')} cannot be parsed, the first: {first}"
            warnings.warn(said, stacklevel=2)
        # Rows that do not parse are missing in ``blocks``; the join gives them nulls.
        places = pl.DataFrame({"line": range(1, frame.height + 1)}, schema={"line": pl.Int64})
        scores = pl.concat(blocks).with_columns(pl.col("line").cast(pl.Int64)).drop("file")
        return places.join(scores, on="line", how="left", maintain_order="left").drop("line")


def run(*overrides: str, store: str | None = None, progress: bool = True) -> Run:
    """Run with Hydra ``overrides``, as ``nightjar run`` takes them, and wait for its end.

    ``store``: where it writes, as the setting of this name. ``progress``: show a bar of training steps. Raises the
    error that the command would exit with. An interrupted kernel interrupts the run; the same call continues it.

        run("experiment=demo", "train.lr=0.01", store="./store")
    """
    command = [sys.executable, "-m", "pipeline.cli", "run", *overrides]
    if store is not None:
        command.append(f"store={store}")
    with tempfile.TemporaryFile("w+") as errors:
        # In a session of its own, a kernel's interrupt reaches it once, from here.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, bufsize=1
        )
        assert process.stdout is not None
        try:
            watched = _watch(process.stdout, progress)
            code = process.wait()
        except KeyboardInterrupt:
            # Wait for the run, which saves a checkpoint before it ends.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            process.stdout.close()
        errors.seek(0)
        if code:
            raise _error(code, errors.read())
    return watched


def runs(store: str = STORE) -> pl.DataFrame:
    """The runs of ``store``, a row each: run, status, dataset, ne, auc, seconds, verdict, version, ..."""
    import polars as pl

    from pipeline.stages.compare import run_line, run_names

    place = _store(store)
    rows = []
    for name in run_names(place):
        line = run_line(place, name).to_json()
        # Left out: mappings, such as seconds by stage, would become columns of structs.
        rows.append({column: value for column, value in line.items() if not isinstance(value, dict)})
    return pl.DataFrame(rows, infer_schema_length=None)


def load_run(name: str, store: str = STORE) -> Run:
    """Return the run ``name`` of ``store``.

    Raises:
        ArtifactError: There is none of this name; the message lists those that there are.
    """
    from pipeline.stages.compare import run_line

    # Called for its error, so that a wrong name is noticed here and not at the first figure.
    run_line(_store(store), name)
    return Run(name, store)


def load_version(
    model: str | None = None, version: str | None = None, *, store: str = STORE, cache_mib: float = 1024.0
) -> Version:
    """A published version: by default the one that serves, of the store's only model.

    ArtifactError where there is no such version, or where the store has several models and ``model`` is None.
    """
    from pipeline.publishing import promotion, versions

    place = _store(store)
    known = versions.models(place)
    if model not in known and not (model is None and len(known) == 1):
        message = "it has no published model"
        if known:
            message = f"models: {', '.join(known)}"
        problem = f"store {place.url} has no model to take by itself"
        if model:
            problem = f"no model {model!r} in store {place.url}"
        raise ArtifactError(f"{problem}; {message}", hint="load_version('<model>', store='<its store>')")
    name = model or known[0]
    chosen = version or promotion.read_current(place, name).version
    if chosen is None:
        raise ArtifactError(f"model {name!r} has no serving version", hint="nightjar models ls")
    versions.find_version(place, name, chosen)
    return Version(name, chosen, store, cache_mib)


def judge(
    candidate: Table,
    incumbent: Table | None = None,
    *overrides: str,
    label: str = "label",
    score: str | None = None,
    incumbent_score: str | None = None,
    logits: bool = False,
    key: Sequence[str] = (),
    slices: Sequence[str] = (),
    weight: str | None = None,
    time: str | None = None,
    user: str | None = None,
    max_gauc_drop: float | None = None,
    ledger: str | os.PathLike[str] | None = None,
    day: date | str | None = None,
) -> GateRecord:
    """Judge the scores of any framework as the gate judges, as ``nightjar judge`` does.

        record = judge("candidate.parquet", "incumbent.parquet", "gate.max_ne_increase=0.001", label="clicked")
        record.verdict, record.reasons

    Args:
        candidate: A file of scores (Parquet, CSV, Arrow; any fsspec URL), or a frame of Polars, pandas or Arrow.
        incumbent: The same of the model that serves; None: there is none, or ``incumbent_score`` is its column in
            ``candidate``.
        overrides: Settings of group ``gate``, and ``seed``.
        label: Column of 0 and 1.
        score: Column of scores; None: ``score``, else ``probability``.
        incumbent_score: Column of the incumbent's scores; None: as ``score``.
        logits: Scores are logits, not probabilities.
        key: Columns that name a row; none: both files have the same rows and labels in the same order.
        slices: Columns by whose values the rows are judged, too.
        weight: Column that says how many rows a row counts as.
        time: Column to sort the rows by; None: they are in the order of time.
        user: Column whose users GAUC is measured on.
        max_gauc_drop: Largest drop of GAUC; None: ``gate.max_gauc_drop``.
        ledger: File of the looks at candidates of this model, at any fsspec URL, which ``gate.budget`` needs; created
            if it is missing.
        day: Of the rows, for the ledger: a date, a time of it, or YYYY-MM-DD; None: today in UTC.

    Returns:
        The record of the gate: figures with intervals, checks, ``verdict`` and ``reasons``.

    Raises:
        ArtifactError: The ledger cannot be read.
        ConfigError: A column, a file's format or an override is wrong, or ``gate.budget`` has no ledger.
        DataError: The rows do not match, or allow no figures.
        LaunchError: Other processes write the ledger all the time, so that no look could be taken.
    """
    from pipeline.evaluation.judge_scores import gate_settings_of, judge_scores
    from pipeline.evaluation.score_files import Columns

    settings, seed = gate_settings_of(overrides)
    columns = Columns(
        label=label,
        score=score,
        incumbent_score=incumbent_score,
        weight=weight,
        key=key,
        slices=slices,
        time=time,
        user=user,
        logits=logits,
    )
    return judge_scores(
        candidate, incumbent, columns, settings, seed=seed, max_gauc_drop=max_gauc_drop, ledger=ledger, day=day
    )


def _watch(lines: Iterable[str], shown: bool) -> Run:
    """Follow the output of a run to its end on a bar; return the run, by the line that begins it."""
    from tqdm.auto import tqdm

    bar: Any = tqdm(disable=not shown, unit="step")
    name, store = "", STORE
    try:
        for line in lines:
            if begun := _RUN.match(line.rstrip("\n")):
                name, store = begun.groups()
            elif step := _STEP.search(line):
                bar.n, bar.total = int(step[1]), int(step[2])
                bar.set_postfix_str(f"NE {step[3]}", refresh=True)
            elif stage := _STAGE.match(line):
                bar.set_description(stage[1])
    finally:
        bar.close()
    return Run(name, store)


def _error(code: int, text: str) -> NightjarError:
    """Return the error of a run that ended with ``code`` and wrote ``text`` to its error stream."""
    # The command line prints its error last. Without one, the run was killed or met an unexpected error, and the end of
    # the text tells most.
    _, printed, words = text.rpartition("nightjar: ")
    if not printed:
        words = text[-4000:]
    message, _, hint = words.strip().partition("\n  hint: ")
    kinds = (kind for kind in NightjarError.__subclasses__() if kind.exit_code == code)
    fallback = f"the run ended with exit code {code}: {EXIT_CODES.get(code, 'a signal')}"
    return next(kinds, NightjarError)(message or fallback, hint=hint)


def _store(url: str) -> Any:
    from pipeline.store.artifacts import Store

    return Store(url)
