"""The exchange of towers' outputs in pieces: TorchRec's values and gradients, and what others wait for leaves first."""

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll

from pipeline.towers.layout import peer_pieces
from pipeline.towers.peer_exchange import PeerExchange
from pipeline.towers.transform import exchange_codecs
from tests.embeddings.ranks import spawn

# One of the ranks has no towers' outputs, and widths whose rows are a multiple of what int8 groups.
WIDTHS = [3, 0, 5, 2, 1, 4, 2]


def compare(folder, precisions, samples):
    """Values and gradients through both exchanges, of towers that double their inputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    widths = WIDTHS[:world]
    for precision in precisions:
        codecs = exchange_codecs(precision)
        theirs = PooledEmbeddingsAllToAll(dist.group.WORLD, widths, codecs=codecs)
        ours = PeerExchange(dist.group.WORLD, widths, codecs)
        drawn = torch.Generator().manual_seed(rank)
        values = torch.randn(world * samples, widths[rank], generator=drawn)
        weights = torch.randn(samples, sum(widths), generator=drawn)
        found = []
        for given in (values.clone().requires_grad_(), values.clone().requires_grad_()):
            result = theirs(2 * given).wait() if not found else ours(given, samples, lambda part: 2 * part)
            (result * weights).sum().backward()
            found.append((result.detach(), given.grad))
        assert torch.equal(found[0][0], found[1][0]), precision
        assert torch.equal(found[0][1], found[1][1]), precision
    (folder / f"done-{rank}").touch()


@pytest.mark.parametrize(
    ("world", "samples"),
    [(2, 160), (3, 32), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 32), (7, 64)])],
)
def test_outputs_and_gradients_are_those_of_torchrec(tmp_path, world, samples):
    spawn(compare, world, tmp_path, ["fp32", "fp16", "bf16", "int8"], samples)
    assert len(list(tmp_path.glob("done-*"))) == world


class Noted(torch.autograd.Function):
    """Notes when a piece is computed and differentiated."""

    @staticmethod
    def forward(ctx, values, order, name):
        ctx.order, ctx.name = order, name
        order.append(name)
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.order.append(f"{ctx.name} back")
        return grad, None, None


def follow(folder, samples):
    """The order of what a rank computes, sends and takes in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange, order = PeerExchange(dist.group.WORLD, [2] * world, None), []
    start = exchange.start

    def noted(codec, given, sends, receives):
        order.append(f"to {','.join(str((peer - rank) % world) for peer in sorted(sends))}")
        return start(codec, given, sends, receives)

    exchange.start = noted
    values = (
        torch.stack([torch.full((samples, 2), float(peer)) for peer in range(world)]).flatten(0, 1).requires_grad_()
    )

    def compute(part):
        peers = sorted({(int(value) - rank) % world for value in part[:, 0]})
        return Noted.apply(part, order, ",".join(map(str, peers)))

    exchange(values, samples, compute).sum().backward()
    if rank == 0:
        (folder / "order").write_text("\n".join(order))


@pytest.mark.parametrize(
    ("world", "samples", "expected"),
    [
        (2, 8, "1 | to 1 | 0 | to 1 | 0 back | 1 back"),
        (2, 64, "1 | to 1 | 1 | to 1 | 0 | to 1 | to 1 | 0 back | 1 back | 1 back"),
        (3, 64, "1 | to 1 | 2 | to 2 | 0 | to 1 | to 2 | 0 back | 2 back | 1 back"),
    ],
)
def test_what_others_wait_for_is_computed_first_and_differentiated_last(tmp_path, world, samples, expected):
    spawn(follow, world, tmp_path, samples)
    assert (tmp_path / "order").read_text().replace("\n", " | ") == expected


def test_many_ranks_exchange_in_few_pieces():
    assert [list(steps) for steps, *_ in peer_pieces(7)] == [[1, 5], [2, 6], [3], [4]]
    assert peer_pieces(1) == []
