"""Who may read what a store holds: what the umask says, as of files that are written in place."""

import os
import stat
from pathlib import Path

import pytest

from pipeline.store import Store


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_store_have_the_mode_that_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        store = Store(str(tmp_path))
        store.write_json("models/m/current.json", {})
        store.write_bytes("runs/r/config.yaml", b"x: 1\n")
        with store.draft("plans/k", kind="plan", key="k", config={}, inputs={}) as draft:
            draft.write_json("a.json", {})
            draft.commit({})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
