"""TorchX components: one file, whose functions TorchX accepts, with one for every stage of Nightjar."""

from pathlib import Path

import pytest
from torchx.specs.file_linter import validate
from torchx.specs.finder import get_component

from pipeline.specs import STAGES

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "components/nightjar.py")
SMALL = ("run=x", "data.synthetic.rows=2000")


@pytest.mark.parametrize("name", ["chain", "stage", *STAGES.names()])
def test_torchx_accepts_the_component_of_every_stage(name: str) -> None:
    assert validate(FILE, name) == []


def test_a_component_starts_the_worker_of_its_stage(tmp_path: Path) -> None:
    for name, app in {
        "ingest": get_component(f"{FILE}:ingest").fn(*SMALL, f"store={tmp_path}"),
        "plan": get_component(f"{FILE}:stage").fn("experiment=dlrmv2", "run=x", f"store={tmp_path}", name="ingest"),
    }.items():
        (role,) = app.roles
        worker = role.args.index("worker")
        assert role.args[worker + 1 : worker + 3] == ["ingest", f"{tmp_path}/runs/x/config.yaml"], name
    assert (tmp_path / "runs/x/steps.json").is_file()


def test_a_component_without_its_inputs_ends_with_the_error_of_the_family(tmp_path: Path, capsys) -> None:
    for name in ("train", "stage"):
        more = {"name": "nonsense"} if name == "stage" else {"nproc": 2}
        with pytest.raises(SystemExit) as ended:
            get_component(f"{FILE}:{name}").fn(*SMALL, f"store={tmp_path}", **more)
        assert ended.value.code == (2 if name == "stage" else 7)
        assert capsys.readouterr().err.startswith("nightjar: ")
