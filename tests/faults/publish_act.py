"""The publish stage while things fail: its own code, without training, exporting and scoring, which take seconds."""

import contextlib
from types import SimpleNamespace
from unittest import mock

from pipeline.checkpoint.reader import ChainReader
from pipeline.publishing import model_commands, promotion
from pipeline.publishing.served import SERVING, Description, local_version
from pipeline.publishing.table_writer import WrittenTable, write_table
from pipeline.records import TableLayout
from pipeline.stages import release as stage
from pipeline.stages.release_gate import WrittenModel
from pipeline.store import Store, artifact_key
from tests.checkpoint import built
from tests.faults.acts import WENT_ON, removed, require, whole
from tests.publishing import made
from tests.records.made import gate_record

RUN = "runs/r/publish/k"


class Publishing:
    """A version is written from a checkpoint, judged beside the one that serves, and promoted."""

    name = "publish"
    phases = ("begin", "tables", "program", "judged", "committed", "promoted")
    former = "v00001-aaaaaaaa"

    def __init__(self, store: Store):
        self.store, self.checkpoint = store, built.put(store, 1)
        self.config = made.config(model="m")
        self.key = artifact_key("publish", {}, {})

    def reset(self):
        """One version serves."""
        for path in ("models", "runs/r/publish"):
            removed(self.store, path)
        made.plain(self.store, self.former)
        promotion.promote(self.store, "m", self.former, by="publish")

    def do(self, reached):
        """The stage, as a run calls it."""
        reached("begin")
        step = SimpleNamespace(key=self.key, config={"incumbent": self.former}, input_keys={"train": "t"}, path=RUN)
        nothing = {"path": "p", "key": "t", "summary": {"final": self.checkpoint.path}, "config": {}}
        names = ("ingest", "plan", "partition", "train", "evaluate")
        inputs = {name: SimpleNamespace(**nothing) for name in names}
        with (
            mock.patch.object(stage, "_write_model", lambda *known: self.write(known[-1], reached)),
            mock.patch.object(stage, "judge_version", lambda *known: self.judge(known[4].path, reached)),
            mock.patch.object(stage, "write_report", lambda draft, record: self.report(draft, record, reached)),
            self.store.draft(RUN, kind="publish", key=self.key, config={}, inputs={}) as draft,
        ):
            summary = stage.publish(self.config, self.store, step, inputs, draft)
            reached("promoted")
            draft.commit(summary)

    def write(self, draft, reached):
        """Tables as the stage writes them; of the program the bytes alone."""
        tables: dict[str, WrittenTable] = {}
        reader = ChainReader(self.store, self.checkpoint)
        for name in built.ROWS:
            tables[name] = write_table(draft, [reader], name, "8")
            reached("tables")
        with draft.open("dense.pt2") as sink:
            reached("program")
            sink.write(b"p" * 5000)
        layouts: dict[str, TableLayout] = {name: table.layout for name, table in tables.items()}
        draft.write_json(SERVING, Description.of(made.SCHEMA, built.DIM, layouts).to_json())
        return WrittenModel(tables, {})

    def judge(self, path, reached):
        """A verdict, on the very files that are served."""
        with local_version(self.store, path) as folder:
            require((folder / "dense.pt2").read_bytes() == b"p" * 5000, "judged other bytes than were written")
        reached("judged")
        return gate_record(incumbent_version=self.former)

    def report(self, draft, record, reached):
        """The verdict alone."""
        reached("committed")
        draft.write_json(stage.GATE, record.to_json())

    def verify(self, ended):
        """What serves is whole; no version is listed that is not; the same stage again publishes once."""
        whole(self.store, "models")
        served = promotion.incumbent(self.store, "m")
        require(served is not None, "what served is gone")
        for each in model_commands.list_versions(self.store, "m").versions:
            require(not each.damaged, f"{each.version} is damaged: {each.problem}")
        if self.store.find(RUN) is None:
            require(ended != WENT_ON, "done, but not committed")
            with contextlib.suppress(StopIteration):
                self.do(lambda phase: None)
        current = promotion.read_current(self.store, "m")
        require([entry.by for entry in current.log] == ["publish"] * 2, f"the log is {current.log}")
        require(current.previous == self.former, f"the line is {current.line}")
        whole(self.store, "models")
