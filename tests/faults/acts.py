"""What is done while things fail and what must hold afterwards. Each act tells ``reached`` its phases."""

import contextlib
import copy
import io
import json
from types import SimpleNamespace

import torch

from pipeline import cli
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.reader import RestoreTarget, restore_newest
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig, compose
from pipeline.core.errors import NightjarError
from pipeline.core.retrying import explained
from pipeline.publishing import promotion
from pipeline.records import GatePart, Result
from pipeline.store import Store
from tests.checkpoint.single import access, shard
from tests.logged import listen
from tests.publishing.made import plain

WENT_ON = "went on"


class BrokenPromiseError(AssertionError):
    """Something that must hold did not."""


def outcome(work):
    """``WENT_ON``, or the one error of the family that ``work`` ended with; BrokenPromiseError for any other."""
    try:
        work()
    except Exception as error:
        known = error if isinstance(error, NightjarError) else explained(error)
        if known is None:
            raise BrokenPromiseError(f"a traceback, not a message: {type(error).__name__}: {error}") from error
        require(known.message and known.hint, f"no hint: {known.message}")
        require(known.exit_code in (3, 5, 7, 8), f"exit code {known.exit_code}: {known.message}")
        return f"{known.exit_code}: {known.message}"
    return WENT_ON


def require(holds, what):
    """BrokenPromiseError with ``what`` unless it ``holds``."""
    if not holds:
        raise BrokenPromiseError(what)


def whole(store, path):
    """Every artifact below ``path`` that looks committed has all its files, as they were written."""
    store.fs.invalidate_cache()
    for full in store.fs.find(store.full(path)):
        if full.endswith("/manifest.json"):
            store.verify(store.find(full[len(store.root) + 1 : -len("/manifest.json")]))


def removed(store, path):
    """Nothing lies at ``path`` any more."""
    store.fs.invalidate_cache()
    if store.exists(path):
        store.fs.rm(store.full(path), recursive=True)


class Marks:
    """TouchedRows of one table, without a kernel."""

    def __init__(self, rows):
        self.key, self.marks = ("t", 0, 0), torch.zeros(rows, dtype=torch.uint8)

    def mask(self, key):
        return self.marks

    def shards(self):
        return [self.key]

    def unite(self):
        pass

    def clear(self):
        self.marks.zero_()

    def fill(self):
        self.marks.fill_(1)


def value(step):
    """What every weight is after ``step``."""
    return 100.0 * step


def at_step(table, dense, step):
    """Let the model be what it is after ``step``."""
    table.weight.fill_(value(step))
    dense["w"].fill_(value(step))


class Taking:
    """A training takes checkpoints 3 and 4, a delta and one that is compacted; 1 and 2 are committed."""

    name = "checkpoint"
    phases = tuple(phase for phase in FaultPoint if phase not in (FaultPoint.BATCH, FaultPoint.RESTORE))
    directory = "runs/r/checkpoints/0123456789"

    def __init__(self, store: Store):
        self.store, self.said = store, listen()

    def reset(self):
        """Checkpoints 1 and 2, by a new trainer."""
        removed(self.store, "runs")
        self.hook = lambda phase: None
        self.table, self.dense = shard(), {"w": torch.zeros(2)}
        rows = SimpleNamespace(**vars(access(self.table)), scratch=None)
        config = CheckpointConfig(policy="one_shot", compact_after=2, keep_last=2, quantise="fp32", state="fp32")
        config.final_quantise = "fp32"
        self.saver = Checkpointer(
            self.store,
            self.directory,
            config,
            CheckpointedModel(rows, Marks(self.table.rows), self.dense, None),
            "k" * 32,
            {},
            {},
            on_point=lambda phase: self.hook(phase),
        )
        for step in (1, 2):
            self.save(step)

    def save(self, step, *, final=False):
        """Train to ``step`` and save it."""
        at_step(self.table, self.dense, step)
        self.saver.model.touched.fill()
        self.saver.save(TrainState(step=step), wait=final, final=final)
        self.saver._collect(raising=False)

    def do(self, reached):
        """Steps 3 and 4."""
        self.hook = reached
        for step in (3, 4):
            self.save(step)
        self.saver.close()

    def verify(self, ended):
        """The newest one there is gives its own step, which is 2 at least; the training can go on to its last one."""
        self.hook = lambda phase: None
        require(self.newest() >= 2, "a committed checkpoint was lost")
        whole(self.store, "runs")
        if ended == WENT_ON:
            self.save(5, final=True)
            require(self.newest() == 5, "the next checkpoint is not the newest one")

    def newest(self):
        """The step that a restore gives, after looking whether all of the model is of it."""
        table, dense = shard(), {"w": torch.zeros(2)}
        said = listen()
        self.store.fs.invalidate_cache()
        _, state = restore_newest(self.store, self.directory, RestoreTarget(access(table), dense))
        require(not said, f"a checkpoint is damaged: {said}")
        require(bool((table.weight == value(state.step)).all()), f"half of another step in {state.step}")
        require(bool((dense["w"] == value(state.step)).all()), f"dense part of another step in {state.step}")
        return state.step


class Restoring(Taking):
    """A training starts from checkpoints 1 (a baseline), 2 and 3 (deltas)."""

    name = "restore"
    phases = ("begin", FaultPoint.RESTORE)
    made = False

    def reset(self):
        """The three of them; nothing below removes one."""
        if not self.made:
            super().reset()
            self.save(3)
            self.saver.close()
            self.made = True
        self.files = sorted(self.store.fs.find(self.store.full(self.directory)))

    def do(self, reached):
        """What a trainer does first."""
        self.hook, self.said = reached, listen()
        rows = SimpleNamespace(**vars(access(self.table)), scratch=None)
        self.table.weight.zero_()
        config = CheckpointConfig(policy="one_shot", keep_last=2)
        model = CheckpointedModel(rows, Marks(self.table.rows), self.dense, None)
        saver = Checkpointer(self.store, self.directory, config, model, "k" * 32, {}, {}, on_point=reached)
        reached("begin")
        state = saver.resume()
        require(state is not None and state.step == 3, f"went back to {state and state.step}: {self.said}")
        require(bool((self.table.weight == value(3)).all()), "restored by half")

    def verify(self, ended):
        """Every file is still there, and the next start restores the newest one."""
        require(self.newest() == 3, "a committed checkpoint was lost")
        require(sorted(self.store.fs.find(self.store.full(self.directory))) == self.files, "files came or went")


A, B, C = (f"v0000{n}-aaaaaaaa" for n in (1, 2, 3))


COMPOSE, _composed = compose.compose, {}


def composed(overrides, folder=None, *, night=False):
    """``compose``, once for the same overrides: it takes longer than all that is looked at here."""
    key = (tuple(overrides), night)
    if key not in _composed:
        _composed[key] = COMPOSE(overrides, folder, night=night)
    return copy.deepcopy(_composed[key])


class Promoting:
    """A night lets version C serve while B does, and an operator rolls back to it."""

    name = "promote"
    phases = ("begin", "checked", "rollback")
    made = False

    def __init__(self, store: Store):
        self.store = store

    def reset(self):
        """A and B served, C is whole."""
        if not self.made:
            for name in (A, B, C):
                plain(self.store, name)
            self.made = True
        removed(self.store, "models/m/current.json")
        for name in (A, B):
            promotion.promote(self.store, "m", name, by="publish")

    def do(self, reached):
        """Both."""
        reached("begin")
        promotion.promote(self.store, "m", C, by="publish", check=lambda: reached("checked"))
        reached("rollback")
        promotion.roll_back(self.store, "m", "complaints")

    def verify(self, ended):
        """The log tells how the line of versions came about; no entry of before is lost, none is there twice."""
        record = self.store.read_json("models/m/current.json")
        line = []
        for entry in record["log"]:
            line = line[:-1] if entry["by"] == "rollback" else [*line, entry["version"]]
        done = [entry["version"] for entry in record["log"]]
        require(line == record["line"], f"log and line differ: {done} {record['line']}")
        require(done in ([A, B], [A, B, C], [A, B, C, B]), f"the log is {done}")
        require(ended != WENT_ON or done == [A, B, C, B], f"done, but the log is {done}")
        require(promotion.incumbent(self.store, "m") is not None, "what serves is gone")
        promotion.promote(self.store, "m", C, by="publish")


class Nightly:
    """``nightjar nightly`` as it is typed; the run itself, which the other acts are about, publishes at once."""

    name = "nightly"
    phases = ("lock", "record", "run", "page", "end")
    runs = 0

    def __init__(self, store: Store):
        self.store = store

    def reset(self):
        """Nothing was published yet."""
        for path in ("runs", "models", "nightly"):
            removed(self.store, path)
        self.hook = lambda phase: None

    def do(self, reached):
        """The night; NightjarError as its exit code and what it wrote say."""
        reached("lock")
        self.hook = reached
        code, said = self.call()
        require("Traceback" not in said, said)
        if code:
            error = NightjarError(said.strip(), hint="hint" if "hint: " in said or "hint" in self.record() else "")
            error.exit_code = code
            raise error

    def record(self):
        """The night's record, empty where there is none."""
        with contextlib.suppress(Exception):
            return self.store.read_json("runs/m-2026-01-05/nightly.json")
        return {}

    def call(self):
        """Exit code, and everything said."""
        from unittest import mock

        from pipeline.cli.commands import nights
        from pipeline.schedule import nightly

        def run(config):
            self.hook("run")
            store, path = Store(config.store), "runs/m-2026-01-05"
            Nightly.runs += 1
            version = f"v00001-{config.seed:08d}"
            if store.find(f"models/m/{version}") is None:
                self.publish(store, f"models/m/{version}", config.run)
            promotion.promote(store, "m", version, by="publish")
            result = Result(run=config.run, status="done", gate=GatePart(verdict="PASS", version=version))
            store.write_json(f"{path}/result.json", result.to_json())
            self.hook("page")
            return 0

        def saved(store, record):
            self.hook("record" if record.outcome == nightly.RUNNING else "end")
            save(store, record)

        save, out = nightly._save, io.StringIO()
        with (
            mock.patch.object(nights, "run_code", run),
            mock.patch.object(nightly, "_save", saved),
            mock.patch.object(compose, "compose", composed),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            code = cli.main(
                [
                    "nightly",
                    "date=2026-01-05",
                    f"store={self.store.url}",
                    "publish.model=m",
                    "experiment=demo",
                    "nightly.lease_seconds=30",
                ]
            )
        return code, out.getvalue()

    def publish(self, store, path, run):
        """A version as the stage leaves it, as far as nights look at it."""
        inputs = {"plan": "p" * 32}
        with store.draft(path, kind="model", key="k" * 32, config={}, inputs=inputs) as draft:
            draft.write_json("tables/a.rows", [])
            draft.commit({"verdict": "PASS", "dataset": "datasets/d/k", "run": run, "checkpoint": "c"})

    def verify(self, ended):
        """Nothing half is there, the lock is free or its holder dead, and the same command ends the night."""
        whole(self.store, "models")
        self.hook = lambda phase: None
        removed(self.store, "nightly")  # a lock that could not be given back is over after nightly.lease_seconds
        code, said = self.call()
        require(code == 0, f"the same command again ended with {code}: {said}")
        require(self.record()["outcome"] == "published", "the night has no verdict")
        log = json.loads(self.store.fs.cat_file(self.store.full("models/m/current.json")))["log"]
        require(len(log) == 1, f"published {len(log)} times")
