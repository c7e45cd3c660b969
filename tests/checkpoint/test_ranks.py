"""Results that only the first rank needs, or only it makes: on real ranks."""

import torch.distributed as dist

from pipeline.checkpoint.collectives import gather_records, run_on_rank0
from pipeline.core.errors import ArtifactError, NightjarError, PassingError
from tests.embeddings.ranks import spawn


def refuse() -> None:
    raise ArtifactError("no", hint="yes")


def on_a_rank(folder) -> None:
    rank = dist.get_rank()
    gathered = gather_records({"rank": rank, "text": "x" * (10 * rank)})
    expected = [{"rank": r, "text": "x" * (10 * r)} for r in range(3)]
    assert gathered == (expected if rank == 0 else [])

    made = []

    def make() -> dict[str, int]:
        made.append(rank)
        return {"rank": rank}

    assert run_on_rank0("making", make) == {"rank": 0} and made == [0] * (rank == 0)
    assert run_on_rank0("nothing", lambda: None) is None
    for work, kind, message in ((refuse, ArtifactError, "no"), (lambda: 1 / 0, PassingError, "failed on rank 0: Zero")):
        try:
            run_on_rank0("counting", work)
        except NightjarError as error:
            assert isinstance(error, kind) and message in error.message
        else:
            raise AssertionError("no error")
    (folder / f"done-{rank}").touch()


def test_the_first_rank_gathers_and_tells(tmp_path) -> None:
    spawn(on_a_rank, 3, tmp_path)
    assert len(list(tmp_path.glob("done-*"))) == 3


def test_a_process_without_a_group_is_the_first_rank() -> None:
    assert gather_records({"a": 1}) == [{"a": 1}] and run_on_rank0("making", lambda: (1, 2)) == [1, 2]
