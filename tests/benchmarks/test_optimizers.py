"""``python -m benchmarks.optimizers``: the row updates that it times run, FBGEMM's and ours."""

import pytest

from benchmarks import optimizers


@pytest.mark.parametrize("name", ["rowwise_adagrad", "lazy_adam"])
def test_an_update_of_rows_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in (("TABLES", 2), ("TABLE_ROWS", 5), ("BATCH", 8), ("WIDTH", 4)):
        monkeypatch.setattr(optimizers, constant, value)
    assert optimizers._updates(name, exponent=0.0)() > 0
