"""A small chain of checkpoints with one fault in any of its files: named, and fallen back or refused, never used."""

import pickle

import numpy as np
import pytest
import torch

from pipeline.checkpoint.reader import RestoreTarget, restore_newest
from pipeline.core.errors import ArtifactError
from pipeline.store import MANIFEST, Store
from pipeline.store.manifest import sealed, unsealed
from tests.checkpoint.single import Picked, access, shard, write
from tests.logged import listen
from tests.tiers import with_slow

FILES = [MANIFEST, "index.json", "state.json", "dense.safetensors"]
FILES += ["rows/t/00000-000000.safetensors", "rows/t/00000-000001.safetensors"]
PLACES = [(step, name) for step in (1, 2, 3) for name in FILES]
IDS = [f"{step}-{name}" for step, name in PLACES]


def model(fill=None):
    rows = access(shard())
    if fill is not None:
        rows.local_shards()[0].weight.add_(fill)
    return rows, {"w": torch.full((2,), float(fill or 0))}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The bytes of all files of a baseline and two consecutive deltas, and each one's table."""
    root = tmp_path_factory.mktemp("chain")
    store, tables = Store(str(root)), {}
    table = shard()
    for step, parents in ((1, ()), (2, (1,)), (3, (1, 2))):
        picked = Picked(*range(step, 10, 2)) if parents else None  # 9 bytes a row: ids do not lie together
        table.weight[picked.rows if picked else slice(None)] += 100 * step
        dense = {"w": torch.full((2,), float(step))}
        write(store, f"c/step-{step:08d}", access(table), dense, parents=parents, picked=picked, chunk=60)
        tables[step] = table.weight.clone()
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert {name for name in files if "/rows/" not in name} == {
        f"c/step-{step:08d}/{name}" for step, name in PLACES if "rows/" not in name
    }
    return files, tables


@pytest.fixture
def chain(pristine, tmp_path):
    files, tables = pristine
    for name, data in files.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return Store(str(tmp_path / "store")), tmp_path / "store", tables


def check(store, tables, file):
    """What is restored is one whole checkpoint, never a mixture; ``file`` is named if it was needed."""
    rows, dense = model()
    rows.local_shards()[0].weight.fill_(-1)
    said = listen()
    try:
        found = restore_newest(store, "c", RestoreTarget(rows, dense))
    except ArtifactError as error:
        assert file in error.message, error.message
        return None
    assert found is not None, "damage was taken for no checkpoint at all"
    step = found[1].step
    assert torch.equal(rows.local_shards()[0].weight, tables[step])
    assert dense["w"].tolist() == [step, step]
    assert step == 3 or any(file in line for line in said), said
    return step


def verified(store, step):
    artifact = store.find(f"c/step-{step:08d}")
    if artifact is None:
        raise ArtifactError("no manifest.json")
    store.verify(artifact)


# Which checkpoint is the newest usable one where a file of another is damaged; None: refused. A parent's position and
# dense part are not needed to restore what rests on it.
def expected(step, name):
    if step == 3:
        return 2
    if name in ("state.json", "dense.safetensors"):
        return 3
    return 1 if step == 2 else None


@pytest.mark.parametrize("drawn", with_slow((5, 30), (5,)))
@pytest.mark.parametrize(("step", "name"), PLACES, ids=IDS)
def test_a_flipped_bit_is_found_and_named(chain, step, name, drawn):
    store, root, tables = chain
    path = root / f"c/step-{step:08d}" / name
    data = path.read_bytes()
    random = np.random.default_rng(step)
    bits = {0, 7, 8 * len(data) - 1, *random.integers(0, 8 * len(data), drawn).tolist()}
    for bit in bits:
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(spoilt)
        with pytest.raises(ArtifactError, match=name.split("/")[-1]):
            verified(store, step)
        assert check(store, tables, name) == expected(step, name)


def test_every_single_bit_of_a_manifest_issealed():
    data = sealed({"kind": "checkpoint", "files": {"a": {"bytes": 12}}, "created": 1.5e-7, "é": [1, 2]})
    assert unsealed(data)["created"] == 1.5e-7
    for bit in range(8 * len(data)):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ValueError, match="its content and its seal"):
            unsealed(bytes(spoilt))


@pytest.mark.parametrize("keep", [0, 0.5, -1])
@pytest.mark.parametrize(("step", "name"), PLACES, ids=IDS)
def test_a_truncated_file_is_found_and_named(chain, step, name, keep):
    store, root, tables = chain
    path = root / f"c/step-{step:08d}" / name
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep < 0 else int(keep * len(data))])
    with pytest.raises(ArtifactError, match=name.split("/")[-1]):
        verified(store, step)
    assert check(store, tables, name) == expected(step, name)


@pytest.mark.parametrize(("step", "name"), PLACES, ids=IDS)
def test_a_missing_file_is_found_and_named(chain, step, name):
    """A missing manifest is a checkpoint that was never committed, and says so only where another rests on it."""
    store, root, tables = chain
    (root / f"c/step-{step:08d}" / name).unlink()
    with pytest.raises(ArtifactError, match=name.split("/")[-1]):
        verified(store, step)
    if name != MANIFEST:
        assert check(store, tables, name) == expected(step, name)
    elif step == 3:
        (rows, dense), said = model(), listen()
        assert restore_newest(store, "c", RestoreTarget(rows, dense))[1].step == 2 and said == []
    else:
        assert check(store, tables, f"depends on step-{step:08d}, which is missing") == expected(step, name)


@pytest.mark.parametrize(("step", "name"), PLACES, ids=IDS)
def test_a_pickle_in_the_place_of_any_file_never_runs(chain, step, name, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    store, root, tables = chain
    (root / f"c/step-{step:08d}" / name).write_bytes(pickle.dumps(Bomb()))
    assert check(store, tables, name) == expected(step, name)
    # With checksums made to fit, so that only the readers of the formats stand in the way.
    if name != MANIFEST:
        reseal(root / f"c/step-{step:08d}", name)
        rows, dense = model()
        if expected(step, name) is None:
            with pytest.raises(ArtifactError):
                restore_newest(store, "c", RestoreTarget(rows, dense))
        else:
            restore_newest(store, "c", RestoreTarget(rows, dense))
    assert not (tmp_path / "ran").exists()


def reseal(folder, name):
    import xxhash

    data = (folder / name).read_bytes()
    record = unsealed((folder / MANIFEST).read_bytes())
    record["files"][name] = {"bytes": len(data), "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"}
    (folder / MANIFEST).write_bytes(sealed(record))
