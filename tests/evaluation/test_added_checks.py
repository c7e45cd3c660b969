"""Gate checks of an installed package: their settings, rows and answers, their errors, their part of the key."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.cli.commands import settings_page as explained
from pipeline.config import Config, GateConfig
from pipeline.config.compose import compose, from_yaml, to_yaml
from pipeline.core.errors import ConfigError
from pipeline.evaluation import ScoredRows, SliceColumn, judge, measure
from pipeline.records import Check, GateRecord
from pipeline.report.gate import gate_markdown
from pipeline.specs import GATE_CHECKS, GateCheck, Registry
from pipeline.stages.steps import steps
from pipeline.store import Store

PACKAGE = '''
"""Three checks: one of the record's figures, one of the rows, and one that has a fault."""

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.records import Check
from pipeline.specs import GateCheck


class Clicks(GateCheck):
    name = "clicks"

    def decide(self, inputs):
        clicks = inputs.record.clicks
        yield Check("clicks", "", clicks >= 10, f"{clicks} clicks in the scored rows")


@dataclass(kw_only=True)
class SpreadSettings:
    least: float = setting(0.0, low=0.0, doc="Smallest standard deviation of the logits.")


class Spread(GateCheck):
    name = "spread"
    settings = SpreadSettings

    def measure(self, rows, options):
        return rows.candidate.astype("float64").std()

    def decide(self, inputs):
        passed = inputs.measured >= inputs.options.least
        words = f"logits vary by {inputs.measured:.3f}, at least {inputs.options.least:g} (gate.spread.least)"
        yield Check("spread of the logits", "gate.spread.least", passed, words)


@dataclass(kw_only=True)
class FaultySettings:
    fault: bool = setting(False, doc="Whether the check raises.")


class Faulty(GateCheck):
    name = "a_faulty_one"
    settings = FaultySettings

    def decide(self, inputs):
        if inputs.options.fault:
            raise KeyError("country")
        return ()


CLICKS, SPREAD, FAULTY = Clicks(), Spread(), Faulty()
'''
POINTS = "spread = {0}:SPREAD\nclicks = {0}:CLICKS\na_faulty_one = {0}:FAULTY\n"
STATES = itertools.count(1_000_000)  # of registries, each once


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, points: str, version: str = "1.2") -> None:
    """A package ``own`` in ``folder`` with ``code``, found as an installed one is. A module of its own each time."""
    module = f"own_checks_{abs(hash((str(folder), code)))}"
    about = folder / f"own-{version}.dist-info"
    about.mkdir(parents=True)
    (folder / f"{module}.py").write_text(code)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[nightjar.gate_checks]\n" + points.format(module))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(GATE_CHECKS, "_specs", None)
    monkeypatch.setattr(Registry, "state", next(STATES))  # no schema that was composed before


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package ``PACKAGE``, for a test."""
    with monkeypatch.context() as patch:
        install(tmp_path / "site", patch, PACKAGE, POINTS)
        yield


def scored(rows: int = 3000) -> ScoredRows:
    rng = np.random.default_rng(0)
    truth = rng.normal(-1.2, 1.3, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    return ScoredRows(labels=labels, candidate=truth.astype(np.float32))


def judged(settings: GateConfig | None = None, rows: ScoredRows | None = None, **known) -> GateRecord:
    settings, rows = settings or GateConfig(replicates=20, blocks=20), rows or scored()
    return judge(dataclasses.replace(measure(rows, settings), **known), settings, rows)


def gate_of(*overrides: str) -> GateConfig:
    return compose(["run=r", "gate.replicates=20", "gate.blocks=20", *overrides]).gate


def test_without_a_package_nothing_is_added() -> None:
    assert [name for name in GATE_CHECKS.names() if GATE_CHECKS.package(name)] == []
    assert type(Config().gate) is GateConfig
    order = "finite comparable rows floors baseline incumbent gauc best labels slices tasks serving coverage importance"
    assert GATE_CHECKS.names() == tuple(order.split())


def test_their_answers_come_last_and_hold_with_their_words(own: None) -> None:
    before = [check.name for check in judged().checks if check.name not in ("clicks", "spread of the logits")]
    passed = judged(gate_of())
    assert passed.verdict == "PASS"
    assert [check.name for check in passed.checks] == [*before, "clicks", "spread of the logits"], "by their names"
    held = judged(gate_of("gate.spread.least=9"))
    (reason,) = held.reasons
    assert held.verdict == "HOLD"
    assert re.fullmatch(r"logits vary by 1\.\d+, at least 9 \(gate.spread.least\)", reason)
    assert reason in gate_markdown(held)
    assert judged(gate_of("gate.spread.least=9", "gate.force='it is known'")).verdict == "PASS"


def test_what_numpy_compared_is_plain_in_the_record(own: None) -> None:
    assert {type(check.passed) for check in judged(gate_of()).checks} == {bool}
    assert GateRecord.from_json(judged().to_json()) == judged()


def test_a_check_that_raises_holds_and_names_its_package(own: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    held = judged(gate_of("gate.a_faulty_one.fault=true"))
    words = "gate check 'a_faulty_one' of package own 1.2 failed: KeyError: 'country'"
    assert (held.verdict, held.reasons) == ("HOLD", (words,))
    assert words in caplog.text and "own_checks_" in caplog.text, "the traceback says where"
    assert [check.name for check in held.checks][-3:] == ["a_faulty_one", "clicks", "spread of the logits"]


def test_their_settings_are_checked_shown_and_recorded_as_others_are(own: None) -> None:
    config = compose(["run=r", "gate.spread.least=0.5"])
    assert config.gate.spread.least == 0.5
    assert from_yaml(to_yaml(config)).gate == config.gate
    for line, message, hint in (
        ("gate.spread.least=-1", "gate.spread.least is -1, expected at least 0", "gate.spread.least=0"),
        ("gate.spread.leest=1", "gate.spread.leest is unknown; did you mean gate.spread.least?", "gate.spread.least=1"),
        ("gate.spread.least=x", "gate.spread.least is 'x', expected a number", "gate.spread.least=<a number>"),
    ):
        with pytest.raises(ConfigError) as caught:
            compose([line])
        assert (caught.value.message, caught.value.hint) == (message, hint)
    (place,) = explained.chosen("gate.spread.least")
    known = explained.record(place)
    assert (known["doc"], known["keys"]) == ("Smallest standard deviation of the logits.", ["publish"])


def test_settings_made_in_a_program_lack_theirs_and_mean_their_defaults(own: None) -> None:
    assert judged(GateConfig(replicates=20, blocks=20)).verdict == "PASS"


def test_the_key_of_publishing_covers_package_version_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"))
    stages = "stages=[ingest,plan,partition,train,evaluate,publish]"
    keys = {}

    def note(name: str, *overrides: str) -> dict:
        made = {step.name: step for step in steps(compose(["run=r", stages, *overrides]), store)}
        keys[name] = {stage: step.key for stage, step in made.items()}
        return made["publish"].config

    assert "packages" not in note("none")["code"]
    for version in ("1.2", "1.3"):
        with monkeypatch.context() as patch:
            install(tmp_path / version, patch, PACKAGE, POINTS, version)
            covered = note(version)
            packages = {f"gate check {name}": f"own {version}" for name in ("spread", "clicks", "a_faulty_one")}
            assert covered["code"]["packages"] == packages
            assert covered["gate"]["spread"] == {"least": 0.0}
            note(f"{version}, other setting", "gate.spread.least=0.5")
    assert len({each["publish"] for each in keys.values()}) == len(keys)
    assert len({each["evaluate"] for each in keys.values()}) == 1
    note("again")
    assert keys["again"] == keys["none"]


FIRST = "from pipeline.records import Check\nfrom pipeline.specs import GateCheck\nimport dataclasses\n"
CHECK = "class Own(GateCheck):\n    name = 'own'\n{0}    def decide(self, inputs):\n        return []\nSPEC = Own()\n"
UNUSABLE = {
    "raises": ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
    "a_class": (FIRST + CHECK.format("") + "SPEC = Own", "which is a class, expected an instance of it"),
    "another_kind": ("class Own:\n    name = 'own'\nSPEC = Own()", "which is Own, expected a pipeline.specs.GateCheck"),
    "no_dataclass": (FIRST + CHECK.format("    settings = int\n"), "whose settings are <class 'int'>, expected a data"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_package_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    code, message = UNUSABLE[case]
    install(tmp_path, monkeypatch, code, "own = {0}:SPEC\n")
    with pytest.raises(ConfigError) as caught:
        compose(["run=r"])
    assert (
        caught.value.message.startswith("package own 1.2 adds gate check 'own', ") and message in caught.value.message
    )


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("max_ne", "setting(1.0, doc='A limit.')", "gate check 'max_ne' (own 1.2) has the name of gate.max_ne"),
        ("own", "1.0", "gate check 'own' (own 1.2) has a setting 'limit' without bounds and documentation"),
    ],
)
def test_settings_that_cannot_be_set_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str, message: str
) -> None:
    code = "from pipeline.config.fields import setting\n" + FIRST
    code += f"@dataclasses.dataclass(kw_only=True)\nclass Limits:\n    limit: float = {field}\n"
    code += CHECK.format("    settings = Limits\n").replace("'own'", repr(name))
    install(tmp_path, monkeypatch, code, f"{name} = {{0}}:SPEC\n")
    with pytest.raises(ConfigError) as caught:
        compose(["run=r"])
    assert caught.value.message.startswith(message)


class Hurried(GateCheck):
    """Added by this process: what a notebook or a test does."""

    name = "hurried"

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.rows: list[ScoredRows] = []

    def measure(self, rows, options):
        self.rows.append(rows)

    def decide(self, inputs):
        return self.answers


def test_an_answer_that_is_none_is_an_error(own: None) -> None:
    with GATE_CHECKS.added(Hurried("PASS")):
        (reason,) = judged(gate_of()).reasons
    assert reason == "gate check 'hurried' failed: TypeError: it answered 'PASS', expected a Check"


def test_it_gets_the_rows_that_the_figures_are_of_and_none_that_are_not_finite() -> None:
    check, rows = Hurried(), scored()
    country = SliceColumn(codes=np.arange(len(rows.labels)) % 3)
    rows = dataclasses.replace(rows, incumbent=rows.candidate, weights=np.ones(3000), slices={"country": country})
    broken = dataclasses.replace(rows, candidate=np.full(3000, np.nan, np.float32))
    with GATE_CHECKS.added(check):
        judged(rows=rows)
        held = judged(rows=broken)
    assert check.rows == [rows]
    assert held.reasons == ("3,000 of the candidate's predictions are not finite",)


def test_one_that_no_reason_overrides_holds_a_forced_model() -> None:
    check = Hurried(Check("law", "", False, "the law forbids it"))
    settings = GateConfig(replicates=20, blocks=20, force="it is known")
    with GATE_CHECKS.added(check):
        assert judged(settings).verdict == "PASS"
        check.can_be_forced = False
        found = judged(settings)
    assert (found.verdict, found.reasons, found.forced) == ("HOLD", ("the law forbids it",), None)


def test_young_labels_excuse_calibration_of_built_in_checks_alone() -> None:
    answer = Check("calibration of the stars", "", False, "the stars are off")
    with GATE_CHECKS.added(Hurried(answer)):
        found = judged(young_labels="labels are young")
    assert found.reasons == ("the stars are off",) and found.checks[0].name == "age of the labels"


def test_a_run_publishes_or_holds_by_them(own: None, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """One training, judged three times: all pass, one holds, one raises."""
    line = ["run", "run=r", f"store={tmp_path}/store", "data=synthetic", "data.synthetic.rows=3000"]
    line += ["data.synthetic.ids_per_feature=50", "model.embedding_dim=4", "model.bottom_mlp=[8]", "model.top_mlp=[8]"]
    line += ["train.global_batch=256", "train.threads_per_rank=1", "train.guard.collapse=false", "gate.min_rows=100"]
    line += ["gate.max_ne=9", "gate.min_auc=0", "gate.max_calibration_error=9", "gate.min_baseline_gain=null"]
    line += ["gate.replicates=20", "gate.min_coverage=0", "gate.importance_rows=0", "gate.max_serving_gap=1"]
    stages = "[ingest,plan,partition,train,evaluate,publish]"
    line += [f"stages={stages}", f"launch.inline={stages}", "publish.quantise=fp32"]
    cases = [
        ("gate.spread.least=99", 6, r"logits vary by 0\.\d+, at least 99 \(gate.spread.least\)"),
        ("gate.a_faulty_one.fault=true", 6, "gate check 'a_faulty_one' of package own 1.2 failed: KeyError: 'country'"),
        ("gate.spread.least=0", 0, ""),
    ]
    store = Store(f"{tmp_path}/store")
    for override, code, reason in cases:
        assert main([*line, override]) == code, capfd.readouterr().err
        gate = store.read_json("runs/r/result.json")["gate"]
        assert gate["verdict"] == ("HOLD" if code else "PASS")
        assert re.fullmatch(reason, "".join(gate["reasons"])), gate["reasons"]
        assert reason == "" or re.search(reason, capfd.readouterr().err)
