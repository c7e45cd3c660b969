"""Benchmarks measure the code that is there."""

import os

import pytest

from benchmarks.harness import require_built


def test_a_library_that_is_older_than_its_sources_is_not_measured(tmp_path):
    native = tmp_path / "kernels" / "native"
    native.mkdir(parents=True)
    for name, modified in (("steps.c", 100), ("steps.h", 90), ("steps.so", 110)):
        (native / name).touch()
        os.utime(native / name, (modified, modified))
    require_built(tmp_path)
    os.utime(native / "steps.h", (120, 120))
    with pytest.raises(SystemExit, match=r"steps.so is older than .*steps.h; make install"):
        require_built(tmp_path)
