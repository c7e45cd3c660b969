"""A host that sees another state of the store than the others proves nothing: no checkpoint is passed over for it."""

import shutil

import pytest
import torch.distributed as dist

from pipeline.checkpoint import collectives
from pipeline.core.errors import DamagedError, NightjarError, PassingError
from tests.checkpoint.chain_runs import checkpointer, write
from tests.checkpoint.test_passing import changes, tree
from tests.embeddings.cases import make
from tests.embeddings.ranks import plan_for, spawn

NEWEST = "ck/step-00000003"
# What one host does not see (its cache of names is old, or its mount is another), and what is said of it.
HIDDEN = {
    "rows": (f"{NEWEST}/rows", "rows/.* is missing from its artifact; but rank . reads"),
    "dense": (f"{NEWEST}/dense.safetensors", "is missing from its artifact; but rank . reads"),
    "parent": ("ck/step-00000001", "do not see the same checkpoints"),
    "newest": (NEWEST, "do not see the same checkpoints .* rank 0 ., the newest step-0000000., rank 1"),
}


def resume_with_two_views(folder, hidden, blind):
    """Resume on two ranks; rank ``blind`` reads a copy of the store in which ``hidden`` is missing."""
    collectives.PAUSES = (0.0,)
    place = folder
    if dist.get_rank() == blind:
        place = folder / "blind"
        shutil.copytree(folder / "store", place / "store")
        gone = place / "store" / HIDDEN[hidden][0]
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    dmp, rows = make(plan_for("row_wise", 2), seed=77)
    saver, said = checkpointer(place, dmp, rows, policy="one_shot")
    with pytest.raises(PassingError, match=HIDDEN[hidden][1]):
        saver.resume()
    assert not any("going back" in line for line in said)
    dist.barrier()


SOONER = [("rows", 1), ("newest", 0)]


@pytest.mark.parametrize(
    ("hidden", "blind"),
    [
        pytest.param(hidden, blind, marks=() if (hidden, blind) in SOONER else pytest.mark.slow)
        for hidden in HIDDEN
        for blind in (0, 1)
    ],
)
def test_what_one_host_does_not_see_is_not_set_aside_and_not_gone_back_from(tmp_path, hidden, blind):
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 2, 3], {"policy": "one_shot"})
    before = tree(tmp_path / "store")
    spawn(resume_with_two_views, 2, tmp_path, hidden, blind)
    assert changes(before, tree(tmp_path / "store")) == []


def test_the_file_that_shows_damage_is_told_to_other_processes():
    error = NightjarError.from_json(DamagedError("m", hint="h", file="a/step-00000001/x").to_json())
    assert isinstance(error, DamagedError)
    assert (error.message, error.hint, error.file) == ("m", "h", "a/step-00000001/x")
