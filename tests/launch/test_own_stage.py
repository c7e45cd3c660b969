"""A stage of one's own: one object in the registry, and it is a command, has keys, runs, and is in every report."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.records.runs import Step
from pipeline.specs import STAGES
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.stages.artifact_keys import keys_of
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store

log = logging.getLogger("pipeline.stages.count")


class Count(Stage):
    """How many rows a dataset has, for a look before it is trained on."""

    name = "count"
    help = "count the rows of the dataset"
    inputs = ("ingest",)
    by_default = False
    inline = True
    needs_rows = True
    settings = (use("evaluate", "*"),)

    def check(self, config: Config) -> None:
        if config.seed == 13:
            raise ConfigError("seed is 13, expected luck", hint="seed=14")

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        log.info("counting")
        with self.draft(store, step) as draft:
            return draft.commit({"counted": inputs["ingest"].summary["rows"]})


SMALL = ["run=x", "stages=[ingest,count]", "data.synthetic.rows=2000", "data.synthetic.ids_per_feature=50"]


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with STAGES.added(Count()):
        yield


def test_it_runs_in_a_chain_and_is_in_result_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", *SMALL, f"store={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "counting\n" in said and "count      done in" in said
    assert "\ncount       counted 2000\n" in said
    store = Store(str(tmp_path))
    result = store.read_json("runs/x/result.json")
    assert result["count"] == {"counted": 2000} and result["stages"]["count"]["status"] == "done"
    page = (tmp_path / "runs/x/report.html").read_text()
    assert ">counted<" in page and ">2000<" in page
    assert cli.main(["count", *SMALL[:1], *SMALL[2:], f"store={tmp_path}"]) == 0
    assert "count      skipped" in capsys.readouterr().out


def test_it_is_a_command_with_help(capsys: pytest.CaptureFixture) -> None:
    assert cli.main([]) == 0
    assert "only this stage: count the rows of the dataset" in capsys.readouterr().out


def test_its_key_covers_its_settings_and_its_inputs() -> None:
    def key(*overrides: str) -> str:
        return next(s.key for s in steps(compose([*SMALL, *overrides]), Store("memory://own")) if s.name == "count")

    assert key() == key("train.lr=0.5")
    assert len({key(), key("evaluate.global_batch=7"), key("seed=5")}) == 3
    assert "count" in keys_of("evaluate.global_batch")
    assert "count" not in [step.name for step in steps(compose(["run=x"]), Store("memory://own"))]


def test_its_own_check_is_asked_where_it_is_to_run() -> None:
    with pytest.raises(ConfigError, match="expected luck"):
        compose([*SMALL, "seed=13"])
    assert compose(["seed=13"]).seed == 13


def test_it_is_gone_afterwards() -> None:
    with STAGES.added():
        assert "count" in STAGES.names() and STAGES.origin("count") == "added by this process"
    with pytest.raises(ConfigError, match="stages is 'county', expected one of: .*count"):
        STAGES.get("county")
