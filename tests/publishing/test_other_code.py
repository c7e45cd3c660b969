"""A version is opened by the code that made it, or by none: other code computes another model of its weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.core.errors import ArtifactError, OtherCodeError
from pipeline.models.dense_model import DenseModel
from pipeline.publishing.dense import CONFIG, probe
from pipeline.publishing.program import PROGRAM
from pipeline.publishing.served import SERVING, ServedModel
from pipeline.records import DENSE, WEIGHTS
from pipeline.specs import MODELS
from pipeline.stages import release_gate
from pipeline.store import Store
from tests.publishing import made
from tests.publishing.test_line import V


def test_the_same_code_opens_what_it_wrote(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    dense, ids = made.rows(20)
    former = ServedModel(Path(store.full(made.write_version(store, "fp32"))), 1 << 20).score(dense, ids)
    folder = Path(store.full(made.write_built(store)))
    record = json.loads((folder / DENSE).read_text())
    assert len(record["probe"]) == 3 and len(set(record["probe"])) == 3
    assert np.allclose(ServedModel(folder, 1 << 20).score(dense, ids), former, atol=1e-6)
    assert not (folder / PROGRAM).exists()


def test_other_code_of_the_same_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = Store(str(tmp_path)), DenseModel.forward
    folder = Path(store.full(made.write_built(store)))
    monkeypatch.setattr(DenseModel, "forward", lambda self, *given: -real(self, *given))
    with pytest.raises(OtherCodeError, match="computes another model of the weights of") as caught:
        ServedModel(folder, 1 << 20)
    assert caught.value.exit_code == 7 and "publish again" in caught.value.hint


@pytest.mark.parametrize(("wrong", "refused"), [(1e-5, False), (0.01, True)])
def test_a_processor_may_round_otherwise_but_no_more(tmp_path: Path, wrong: float, refused: bool) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_built(store, wrong=wrong)))
    with pytest.raises(OtherCodeError) if refused else contextlib.nullcontext():
        ServedModel(folder, 1 << 20)


def test_a_probe_that_is_not_finite_is_not_compared() -> None:
    module = made.dense_part()
    assert len(probe(module, made.SCHEMA, made.MODEL, 1)) == 3
    with torch.no_grad():
        for each in module.parameters():
            each.fill_(torch.nan)
    assert probe(module, made.SCHEMA, made.MODEL, 1) == ()


def test_another_version_of_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_built(store, package="own 0.1.0")))
    with pytest.raises(OtherCodeError, match=r"was made by own 0\.1\.0, but no such package is installed") as caught:
        ServedModel(folder, 1 << 20)
    assert caught.value.hint.startswith("pip install own==0.1.0")
    monkeypatch.setitem(MODELS._origins, "dlrm", "own 0.2.0")
    with pytest.raises(OtherCodeError, match=r"was made by own 0\.1\.0, but own 0\.2\.0 is installed"):
        ServedModel(folder, 1 << 20)
    monkeypatch.setitem(MODELS._origins, "dlrm", "own 0.1.0")
    ServedModel(folder, 1 << 20)


@pytest.mark.parametrize(
    ("then", "now"),
    [("- 8\n", "- 16\n"), ("name: dlrm", "name: unheard_of"), ("embedding_dim: 12", "embedding_dim: 8")],
)
def test_weights_that_do_not_fit_the_settings_are_a_message(tmp_path: Path, then: str, now: str) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_built(store)))
    text = (folder / CONFIG).read_text()
    assert then in text
    (folder / CONFIG).write_text(text.replace(then, now))
    with pytest.raises(OtherCodeError, match="the dense part of .* cannot be built by what is installed here"):
        ServedModel(folder, 1 << 20)


@pytest.mark.parametrize("name", [DENSE, WEIGHTS, CONFIG])
def test_a_version_that_lacks_a_file_of_its_dense_part_is_not_read_from_the_program(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_built(store)))
    (folder / PROGRAM).write_bytes(Path(store.full(f"{made.write_version(store, 'fp32')}/{PROGRAM}")).read_bytes())
    assert json.loads((folder / SERVING).read_text())["weights"] == WEIGHTS
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match="the dense part of .* cannot be read"):
        ServedModel(folder, 1 << 20)


def test_an_incumbent_of_other_code_holds_the_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def opened(store: Store, path: str, memory: int, *, calibrate: bool = True) -> Iterator[str]:
        if path.endswith(V[4]):
            raise OtherCodeError(f"{path} was made by own 0.1.0", hint="pip install own==0.1.0")
        yield path

    for name, other in (("open_version", opened), ("translated", lambda *_: None), ("require_sound", lambda *_: None)):
        monkeypatch.setattr(f"pipeline.stages.release_ranks.{name}", other)
    store = Store(str(tmp_path))
    settings = made.config(model="m")
    settings.gate.best_of_last = 1
    with store.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        dataset = draft.commit({})
    with release_gate._open_models(settings, store, "candidate", dataset, V[4]) as found:
        assert [*found.models] == ["candidate"]
        assert found.problem.endswith("was made by own 0.1.0")
