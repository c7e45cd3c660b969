"""Keys know code: the package and version of a model, a stage's revision, a machine that was measured again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.calibration import hardware_cache
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.records.runs import Step
from pipeline.specs import ID_MAPPINGS, MODELS, STAGES
from pipeline.stages.steps import steps
from pipeline.store import Store
from tests.commands import nightjar

OWN = "from pipeline.models.rankers import DLRM\nfrom pipeline.models.settings import DlrmConfig\n"
OWN += "import dataclasses\n@dataclasses.dataclass(kw_only=True)\nclass OwnConfig(DlrmConfig):\n    name: str = 'own'\n"
OWN += "class Own:\n    name, config, build = 'own', OwnConfig, DLRM.build\nSPEC = Own()\n"
AFTER_THE_MODEL = ["plan", "partition", "train", "evaluate"]


def install(folder: Path, version: str) -> None:
    """A package in ``folder`` that adds model ``own``."""
    about = folder / "own-0.dist-info"
    about.mkdir(parents=True)
    (folder / "own_model_of_a_version.py").write_text(OWN)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[nightjar.models]\nown = own_model_of_a_version:SPEC\n")


def made(config: Config, store: Path) -> dict[str, Step]:
    return {step.name: step for step in steps(config, Store(str(store)))}


def test_another_version_of_a_package_trains_its_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for version in ("0.1.0", "0.2.0"):
        install(tmp_path / version, version)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(tmp_path / version), *sys.path])
            patch.setattr(MODELS, "_specs", None)
            found[version] = made(compose(["run=r", "model=own"]), tmp_path)
            dataset = found[version]["ingest"].key
            assert found[version]["train"].config["code"] == {"packages": {"model": f"own {version}"}}
    first, second = found.values()
    assert [name for name in first if first[name].key != second[name].key] == AFTER_THE_MODEL
    assert first["train"].scratch != second["train"].scratch and dataset


def test_a_package_that_one_feature_asks_for_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice may be named by an entry, as a feature's mapping and a table's optimizer are."""
    code = "from pipeline.ingest.id_mappings import HashMapping\nSPEC = HashMapping(name='own', doc='a hash')\n"
    (tmp_path / "own_mapping_of_a_feature.py").write_text(code)
    about = tmp_path / "own-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 3\n")
    (about / "entry_points.txt").write_text("[nightjar.id_mappings]\nown = own_mapping_of_a_feature:SPEC\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        patch.setattr(ID_MAPPINGS, "_specs", None)
        config = compose(["run=r", "experiment=demo"])
        feature = next(iter(config.data.sparse))
        chosen = compose(["run=r", "experiment=demo", f"data.sparse.{feature}.mapping=own"])
        assert "code" not in made(config, tmp_path)["ingest"].config
        assert made(chosen, tmp_path)["ingest"].config["code"] == {"packages": {"id mapping": "own 3"}}


@pytest.mark.parametrize("stage", STAGES.names())
def test_a_revision_gives_another_key_to_the_stage_and_to_what_reads_it(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["run=r", "stages=[ingest,plan,partition,train,evaluate,publish]"])
    before, revision = made(config, tmp_path), STAGES.get(stage).revision
    for name, step in before.items():
        own = STAGES.get(name).revision
        assert step.config.get("code") == ({"revision": own} if own else None)
    monkeypatch.setattr(type(STAGES.get(stage)), "revision", revision + 1)
    after = made(config, tmp_path)
    moved = [name for name in before if before[name].key != after[name].key]
    assert moved == [name for name in before if name == stage or stage in _above(before, name)]
    assert (before["train"].scratch != after["train"].scratch) == (stage in ("ingest", "train"))


def _above(made: dict[str, Step], name: str) -> set[str]:
    inputs = set(made[name].inputs)
    return inputs.union(*(_above(made, each) for each in inputs))


def test_a_machine_that_is_measured_again_is_planned_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = compose(["run=r", "hardware=auto"])
    keys = [made(config, tmp_path)["plan"].key]
    hardware_cache.keep(config, {"lookup_ns": 1.0}, 3.0)
    keys.append(made(config, tmp_path)["plan"].key)
    for lookup_ns in (2.0, 3.0):
        monkeypatch.setattr("pipeline.calibration.quick.quick_figures", lambda config, ns=lookup_ns: {"lookup_ns": ns})
        assert hardware_cache.measure_again(config).figures == {"lookup_ns": lookup_ns}
        keys.append(made(config, tmp_path)["plan"].key)
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_figures_measured_again_after_the_cache_was_lost_are_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new container has an empty cache. Equal figures are one plan, wherever they were measured."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config, keys = compose(["run=r", "hardware=auto"]), []
    monkeypatch.setattr(hardware_cache, "is_disturbed", lambda began, ended: False)
    for home, lookup_ns in (("a", 2.0), ("b", 3.0), ("c", 2.0)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        monkeypatch.setattr("pipeline.calibration.quick.quick_figures", lambda config, ns=lookup_ns: {"lookup_ns": ns})
        hardware_cache.measure_again(config)
        keys.append(made(config, tmp_path)["plan"].key)
    assert keys[0] != keys[1] and keys[0] == keys[2]


def test_figures_of_a_loaded_machine_are_planned_with_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of a plan that is made in this process is the one that the next process finds."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, keys = compose(["run=r", "hardware=auto"]), []
    for busy, lookup_ns in ((True, 9.0), (True, 8.0), (False, 2.0), (False, 3.0)):
        monkeypatch.setattr(hardware_cache, "_taken_here", set())  # in processes of their own
        monkeypatch.setattr(hardware_cache, "_was_busy", lambda busy=busy: busy)
        monkeypatch.setattr(hardware_cache, "is_disturbed", lambda began, ended, busy=busy: busy)
        monkeypatch.setattr("pipeline.calibration.quick.quick_figures", lambda config, ns=lookup_ns: {"lookup_ns": ns})
        keys.append(made(config, tmp_path)["plan"].key)
        found = hardware_cache.with_figures(config).hardware.lookup_ns
        assert found == (9.0 if busy else 2.0)
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert made(config, tmp_path)["plan"].key == keys[2]


def test_hardware_that_names_its_figures_is_not_measured_again() -> None:
    done = nightjar("calibrate", "--again", "hardware=laptop")
    assert done.returncode == 2 and "hardware=laptop names all its figures" in done.stderr
    assert "nightjar calibrate without --again" in done.stderr
