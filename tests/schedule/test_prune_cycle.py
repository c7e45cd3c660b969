"""Real nights around a pruning: what the next night, a rollback and a call again need is still there."""

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.store import Store

from .test_cycle import SETTINGS

WORLD = ("data=synthetic", "data.synthetic.rows=3000", "data.synthetic.ids_per_feature=100", "gate.force='a test'")


@pytest.mark.slow
def test_nights_go_on_from_a_store_that_was_pruned_as_far_as_it_goes(tmp_path: Path, capsys) -> None:
    store = Store(str(tmp_path / "store"))

    def command(*words: str) -> str:
        code = cli.main(list(words))
        said = capsys.readouterr()
        assert code == 0, said.out + said.err
        return said.out

    def night(day: int) -> str:
        return command("nightly", f"date=2026-01-0{day}", f"store={store.url}", *WORLD, *SETTINGS)

    for day in (1, 2, 3):
        night(day)
    command("models", "gc", "clicks", "--keep", "1", "--min-age", "0", "--store", store.url)
    command("ckpt", "gc", "--store", store.url)
    said = command("store", "gc", "--keep-days", "0", "--grace-hours", "0", "--store", store.url)
    assert "removed runs/clicks-2026-01-01" in said
    assert store.names("runs") == ["clicks-2026-01-02", "clicks-2026-01-03"]
    assert "nothing to do" in night(3)
    command("rollback", "clicks", "--reason", "a test", "--store", store.url)
    assert "warm start from v00002" in night(4)
