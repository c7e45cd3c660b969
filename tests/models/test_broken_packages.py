"""Packages whose models cannot be used: one message that names the package, at every command that asks for models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.cli.commands.doctor import choices
from pipeline.core.errors import ConfigError
from pipeline.models.settings import DlrmConfig
from pipeline.specs import MODELS, Registry
from pipeline.specs.model import model_problem

MODEL = "from pipeline.models.settings import DlrmConfig as Config\nclass M:\n    name = 'own'\n    config = Config\n"
CASES = {
    "raises": ("raise RuntimeError('no GPU')", "cannot be imported: RuntimeError: no GPU"),
    "unparsable": ("def (", "cannot be imported: SyntaxError"),
    "missing": ("import not_there_at_all", "cannot be imported: No module named 'not_there_at_all'"),
    "nameless": ("SPEC = object()", "whose spec has the name None"),
    "unconfigured": (
        "class M:\n    name = 'own'\n    config = int\nSPEC = M()",
        "expected a dataclass derived from ModelConfig",
    ),
    "a_class": (f"{MODEL}SPEC = M", "which is a class, expected an instance"),
    "of_another_name": (
        f"{MODEL}SPEC = M()",
        "whose config DlrmConfig has the default name 'dlrm', expected 'own'",
    ),
}


def install(folder: Path, module: str, code: str) -> None:
    """A package in ``folder`` that adds model ``own``: ``SPEC`` of ``module``."""
    (folder / f"{module}.py").write_text(code)
    about = folder / "own-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[nightjar.models]\nown = {module}:SPEC\n")


@pytest.mark.parametrize(("case", "code", "message"), [(case, *each) for case, each in CASES.items()], ids=list(CASES))
def test_a_package_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch, case: str, code: str, message: str
) -> None:
    module = f"own_package_that_{case}"
    install(tmp_path, module, code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    models = Registry("model", setting="model.name", home="pipeline.models", group=MODELS.group, problem=MODELS.problem)
    with pytest.raises(ConfigError) as caught:
        models.names()
    assert caught.value.message.startswith("package own 1.0 adds model 'own'") and message in caught.value.message
    monkeypatch.setattr("pipeline.cli.commands.doctor.REGISTRIES", (models,))
    assert [(each.level, each.found) for each in choices()] == [("fail", caught.value.message)]


def test_built_in_models_have_no_problem() -> None:
    assert {spec.name: model_problem(spec) for spec in MODELS} == dict.fromkeys(MODELS.names(), "")
    assert MODELS.get("dlrm").config is DlrmConfig
