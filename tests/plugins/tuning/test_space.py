"""Sweeps become dimensions, and what cannot be searched is refused by name."""

import pytest

from pipeline.core.errors import ConfigError
from pipeline.plugins.tuning.space import edges, held, rounded, split
from pipeline.records.study import Dimension

KNOWN = {
    "train.lr=tag(log, interval(1e-4,1e-1))": Dimension(kind="float", low=1e-4, high=1e-1, log=True),
    "train.lr=interval(0,0.1)": Dimension(kind="float", low=0.0, high=0.1),
    "train.warmup_steps=int(interval(10,200))": Dimension(kind="int", low=10, high=200),
    "train.warmup_steps=tag(log, int, interval(1,64))": Dimension(kind="int", low=1, high=64, log=True),
    "model.embedding_dim=range(8,33,8)": Dimension(kind="int", low=8, high=32, step=8),
    "train.lr=range(0.1,0.45,0.1)": Dimension(kind="float", low=0.1, high=0.4, step=0.1),
    "train.lr=range(0,1,0.3)": Dimension(kind="float", low=0.0, high=0.9, step=0.3),
    "train.lr=range(1.0,0.05,-0.3)": Dimension(kind="float", low=0.1, high=1.0, step=0.3),
    "model=choice(dcnv2,dhen)": Dimension(kind="choice", choices=("dcnv2", "dhen")),
    "model=dcnv2,dhen,dcnv2": Dimension(kind="choice", choices=("dcnv2", "dhen")),
    "model.top_mlp=choice([64,32],[32])": Dimension(kind="choice", choices=("[64,32]", "[32]")),
}


@pytest.mark.parametrize("override", KNOWN)
def test_a_sweep_is_a_dimension_and_comes_back_from_its_record(override: str) -> None:
    shared, space = split(["experiment=demo", override, "seed=1"])
    ((key, dimension),) = space.items()
    assert shared == ["experiment=demo", "seed=1"] and key == override.partition("=")[0]
    wanted = KNOWN[override]
    assert (dimension.kind, dimension.choices, dimension.log) == (wanted.kind, wanted.choices, wanted.log)
    ends = (wanted.low, wanted.high, wanted.step)
    assert (dimension.low, dimension.high, dimension.step) == ends
    assert Dimension.from_json(dimension.to_json()) == dimension


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["train.lr=0.1"], "nothing to tune: no setting has several values", "nightjar tune 'train.lr=tag"),
        (["seed=1,2", "stages=a,b"], "stages=a,b searches stages, but all trials of a study share it", "one value"),
        (["experiment=demo,adult"], "searches experiment, but all trials", "experiment=<one value>"),
        (["train.lr=interval(1,0.5)"], "ends at 0.5, expected more than its start 1", "train.lr=interval(0.5,1)"),
        (["train.lr=interval(1,1)"], "ends at 1, expected more than its start 1", "train.lr=1"),
        (["train.lr=tag(log,interval(0,1))"], "starts at 0, but a logarithmic range", "interval(0.001,1)"),
        (["train.lr=tag(lin,interval(0,1))"], "has tag 'lin', expected log or int", "train.lr=tag(log, interval(0,1))"),
        (["model.embedding_dim=range(9,9)"], "has no values", "model.embedding_dim=range(1,10)"),
        (["data=glob(*)"], "cannot be searched, expected interval, range or choice", "choice"),
        (["seed=1,2", "seed=3,4"], "seed is searched twice", "remove one"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(overrides: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split(overrides)
    assert message in caught.value.message and hint in caught.value.hint


def test_numbers_have_four_digits_and_stay_in_their_range() -> None:
    space = Dimension(kind="float", low=0.000123441, high=0.1)
    assert rounded(space, 0.0123456) == 0.01235
    assert rounded(space, 0.000123441) == space.low
    assert rounded(Dimension(kind="int", low=1, high=9), 3) == 3


def test_a_value_is_held_where_the_space_has_it() -> None:
    numbers = Dimension(kind="int", low=8, high=32, step=8)
    assert [held(numbers, each) for each in (16, 16.0, 12, 40, "16", True, None)] == [16, 16, *[None] * 5]
    words = Dimension(kind="choice", choices=("8", "16"))
    assert [held(words, each) for each in (8, "16", 4, None)] == ["8", "16", None, None]


def test_a_choice_is_the_present_value_however_it_is_written() -> None:
    _, space = split(["train.shuffle=true,false", "train.lr=choice(0,1e-3)", "model.top_mlp=choice([64,32],[8])"])
    assert held(space["train.shuffle"], "true") == "True" and held(space["train.shuffle"], "false") == "False"
    assert held(space["train.lr"], 0.0) == "0" and held(space["train.lr"], 0.001) == "0.001"
    assert held(space["model.top_mlp"], "[64, 32]") == "[64,32]" and held(space["model.top_mlp"], "[64") is None


def test_edges_are_every_choice_and_both_ends() -> None:
    _, space = split(["model=a,b", "train.lr=interval(0.1,0.5)"])
    assert list(edges(space)) == [["model=a"], ["model=b"], ["train.lr=0.1"], ["train.lr=0.5"]]
