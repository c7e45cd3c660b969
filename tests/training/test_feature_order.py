"""A dataset that was made anew with its features in another order is refused by what was trained on the former one.

Keys do not cover the order of features, so both datasets have one name.
"""

import numpy as np
import pytest

from tests.commands import nightjar_in_turn

DATA = ["data=csv", "data.name=log", "data.label.column=click", "+data.sparse.user={}", "+data.sparse.ad={}"]
TRAIN = [
    "hardware=laptop",
    "train.global_batch=128",
    "train.threads_per_rank=1",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
]
FIRST, TURNED = (["+data.dense.x1={}", "+data.dense.x2={}"], ["+data.dense.x2={}", "+data.dense.x1={}"])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """How commands end that follow one another in one store."""
    folder = tmp_path_factory.mktemp("order")
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(1500, 2)), rng.integers(0, 20, (1500, 2))
    clicks = rng.random(1500) < 1 / (1 + np.exp(-3 * x[:, 0]))
    rows = ["click,x1,x2,user,ad"]
    rows += [f"{int(c)},{a:.4f},{b:.4f},u{u},a{v}" for c, (a, b), (u, v) in zip(clicks, x, ids, strict=True)]
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    given = ["run", *DATA, *TRAIN, f"data.path={folder / 'log.csv'}", f"store={folder / 'store'}"]
    evaluate = [*FIRST, "run=a", "force=true", "stages=[evaluate]"]
    publish = [*FIRST, "run=a", "gate.min_rows=100", "stages=[publish]"]
    commands = {
        "first": [*FIRST, "run=a"],
        "anew": [*TURNED, "run=b", "force=true", "stages=[ingest]"],
        "publish": publish,
        "evaluate": evaluate,
        "longer": [*FIRST, "run=a", "train.epochs=3", "stages=[train]"],
        "mended": [*FIRST, "run=a", "force=true", "stages=[ingest]"],
        "evaluate again": evaluate,
        "publish again": publish,
    }
    return dict(zip(commands, nightjar_in_turn([[*given, *each] for each in commands.values()]), strict=True))


@pytest.mark.parametrize("command", ["evaluate", "publish", "longer"])
def test_scores_versions_and_further_steps_of_columns_that_moved_are_refused(said, command):
    assert said["first"].returncode == said["anew"].returncode == 0, said["anew"].stderr
    assert said[command].returncode == 2, said[command].stderr
    words = " ".join(said[command].stderr.split())
    assert "in another order: feature 1 was 'x1', is 'x2'" in words
    assert "data.dense in the order x1, x2, and nightjar ingest force=true" in words


def test_the_remedy_of_the_message_helps(said):
    for command in ("mended", "evaluate again", "publish again"):
        assert said[command].returncode == 0, said[command].stderr
