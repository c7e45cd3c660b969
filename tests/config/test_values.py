"""The walk that compares every setting with its declaration, by kinds of settings."""

import dataclasses
import re
from typing import Any

import pytest

from pipeline.config import Config, DataConfig, DriftLimits, HardwareConfig, ModelConfig, SparseFeature, TablePin
from pipeline.config.checks import check
from pipeline.config.compose import compose
from pipeline.config.features import DenseFeature, TableFigures
from pipeline.config.fields import METADATA, check_values, setting
from pipeline.config.paths import places
from pipeline.core.errors import ConfigError


@dataclasses.dataclass(kw_only=True)
class Entry:
    """An entry of a dictionary."""

    size: int = setting(1, low=1, doc="A size.")


@dataclasses.dataclass(kw_only=True)
class Group:
    """One setting of each kind."""

    word: str = setting("red", choices=("red", "green"), doc="A word.")
    listed: str = setting("a", choices=lambda: ["a", "b"], doc="A word of a registry.")
    unset: str = setting("", choices=("red", "green"), doc="A word, or empty.")
    maybe: str | None = setting(None, choices=("red", "green"), doc="A word, or null.")
    count: int = setting(3, low=1, high=9, doc="A whole number.")
    large: int = setting(3, low=0, high=2**63 - 1, doc="A whole number.")
    share: float = setting(0.5, low=0.0, high=1.0, doc="A number.")
    most: float | None = setting(None, high=2.5, doc="A number without a lower end, or null.")
    steps: int | str = setting("auto", low=1, auto=True, doc="A number or auto.")
    words: list[str] = setting(factory=list, choices=("red", "green"), doc="Several words.")
    named: dict[str, str] = setting(factory=dict, choices=("red", "green"), doc="Words by name.")
    entries: dict[str, Entry] = setting(factory=dict, doc="Groups by name.")
    several: list[Entry] = setting(factory=list, doc="Groups.")
    inner: Entry = setting(factory=Entry, doc="A group.")
    free: str = setting("x", doc="Any text.")

    def check(self, path: str) -> None:
        """``count`` and ``large`` must differ by no more than 100."""
        if self.large - self.count > 100:
            raise ConfigError(f"{path}.large is far from {path}.count", hint=f"{path}.large=3")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"word": "blue"}, "g.word is 'blue', expected one of: red, green", "g.word=red"),
    ({"word": "grene"}, "g.word is 'grene', expected one of: red, green", "g.word=green"),
    ({"listed": "c"}, "g.listed is 'c', expected one of: a, b", "g.listed=a"),
    ({"unset": "blue"}, "g.unset is 'blue', expected one of: red, green", "g.unset=red"),
    ({"maybe": ""}, "g.maybe is '', expected one of: red, green", "g.maybe=red"),
    ({"count": 0}, "g.count is 0, expected between 1 and 9", "g.count=1"),
    ({"count": 10}, "g.count is 10, expected between 1 and 9", "g.count=9"),
    ({"large": -1}, "g.large is -1, expected between 0 and 9223372036854775807", "g.large=0"),
    ({"share": 1.5}, "g.share is 1.5, expected between 0 and 1", "g.share=1"),
    ({"share": float("nan")}, "g.share is nan, expected a finite number", "g.share=0"),
    ({"share": float("inf")}, "g.share is inf, expected a finite number", "g.share=0"),
    ({"most": 3.0}, "g.most is 3, expected at most 2.5", "g.most=2.5"),
    ({"steps": 0}, "g.steps is 0, expected at least 1", "g.steps=1"),
    ({"steps": "many"}, "g.steps is 'many', expected auto or a whole number", "g.steps=auto"),
    ({"words": ["red", "gren"]}, "g.words names 'gren', expected some of: red, green", "g.words=[red,green]"),
    ({"named": {"x": "blue"}}, "g.named.x is 'blue', expected one of: red, green", "g.named.x=red"),
    ({"entries": {"x": Entry(size=0)}}, "g.entries.x.size is 0, expected at least 1", "g.entries.x.size=1"),
    ({"several": [Entry(), Entry(size=0)]}, "g.several.size is 0, expected at least 1", "g.several.size=1"),
    ({"inner": Entry(size=0)}, "g.inner.size is 0, expected at least 1", "g.inner.size=1"),
    ({"large": 200}, "g.large is far from g.count", "g.large=3"),
]


@pytest.mark.parametrize(("values", "message", "hint"), WRONG, ids=[f"{case[0]}" for case in WRONG])
def test_each_kind_of_setting_is_compared_with_its_declaration(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_values(Group(**values), "g")
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_defaults_and_values_inside_their_bounds_pass() -> None:
    check_values(Group())
    check_values(Group(word="green", maybe="red", count=9, share=0.0, most=-7.0, steps=5, words=["green"], unset=""))


# Entries of dictionaries were not all compared before: each has its name in the message.
ENTRIES: list[tuple[str, str, Any, str]] = [
    ("data", "sparse", SparseFeature(rows=2), "data.sparse.a.rows is 2, expected between 3 and 2147483647"),
    ("data", "sparse", SparseFeature(mapping="vocap"), "data.sparse.a.mapping is 'vocap', expected one of: vocab,"),
    ("data", "sparse", SparseFeature(max_ids=0), "data.sparse.a.max_ids is 0, expected between 1 and 10000000"),
    ("data", "sparse", SparseFeature(bins=4, separator=","), "data.sparse.a has more than one of cross, bins and"),
    ("data", "dense", DenseFeature(bins=1), "data.dense.a.bins is 1, expected between 2 and 10000"),
    ("data", "dense", DenseFeature(transform="log"), "data.dense.a.transform is 'log', expected one of: log1p,"),
    ("data", "dense", DenseFeature(clip=[2.0, 1.0]), "data.dense.a.clip is [2.0, 1.0], expected two rising numbers"),
    ("data", "tables", TableFigures(rows=0), "data.tables.a.rows is 0, expected between 1 and 2147483647"),
    ("plan", "tables", TablePin(tier="hmb"), "plan.tables.a.tier is 'hmb', expected one of: hbm, hbm_cached, ddr, ssd"),
    ("plan", "tables", TablePin(avoid=["sdd"]), "plan.tables.a.avoid names 'sdd', expected some of: hbm,"),
    ("checkpoint", "tables", "5", "checkpoint.tables.a is '5', expected one of: auto, mixed, 2, 3, 4, 8, fp16, fp32"),
]


@pytest.mark.parametrize(("group", "name", "entry", "message"), ENTRIES, ids=[case[3][:40] for case in ENTRIES])
def test_entries_of_dictionaries_are_compared_by_name(group: str, name: str, entry: Any, message: str) -> None:
    data = DataConfig(name="d", format="synthetic", sparse={"s": SparseFeature()})
    config = Config(data=data, hardware=HardwareConfig(name="h"))
    check(config)
    getattr(getattr(config, group), name)["a"] = entry
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_groups_inside_groups_are_compared() -> None:
    with pytest.raises(ConfigError, match="data.checks.hold.psi is -1, expected at least 0"):
        data = DataConfig(name="d", format="synthetic", sparse={"s": SparseFeature()})
        data.checks.hold = DriftLimits(psi=-1.0)
        check_values(data, "data")
    with pytest.raises(ConfigError, match="model.embedding_dim is 6, expected a multiple of 4"):
        check_values(ModelConfig(embedding_dim=6), "model")


def test_a_divisor_of_zero_is_refused() -> None:
    """A row whose gradients were all 0 would become 0 / 0."""
    for name in ("sparse_options.eps", "sparse_options.beta", "dense_options.eps"):
        with pytest.raises(ConfigError, match=rf"train.{name} is 0, expected at least 1e-30"):
            compose([f"train.{name}=0"])


def test_every_field_is_declared_with_a_sentence() -> None:
    sentence = re.compile(r"\S.*\.")
    wrong = []
    for place in places():
        text = place.field.metadata[METADATA].doc
        if not sentence.fullmatch(text) or "  " in text:
            wrong.append(f"{place.path}: {text!r}")
        about = place.group.__doc__ if place.group else "."
        if not about.endswith(".") and "\n" not in about:
            wrong.append(f"{place.path}: its group's docstring {about!r}")
    assert wrong == [], "\n".join(wrong)
