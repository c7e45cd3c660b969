"""The exchange of towers' outputs in pieces: TorchRec's values and gradients, and what others wait for leaves first."""

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll

from pipeline.towers.peer_exchange import PeerExchange
from pipeline.towers.transform import exchange_codecs
from tests.embeddings.ranks import spawn

# One of the ranks has no towers' outputs, and widths whose rows are a multiple of what int8 groups.
SAMPLES, WIDTHS = 32, [3, 0, 5, 2, 1, 4, 2]


def compare(folder, precisions):
    """Values and gradients through both exchanges, of towers that double their inputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    widths = WIDTHS[:world]
    for precision in precisions:
        codecs = exchange_codecs(precision)
        theirs = PooledEmbeddingsAllToAll(dist.group.WORLD, widths, codecs=codecs)
        ours = PeerExchange(dist.group.WORLD, widths, codecs)
        drawn = torch.Generator().manual_seed(rank)
        values = torch.randn(world * SAMPLES, widths[rank], generator=drawn)
        weights = torch.randn(SAMPLES, sum(widths), generator=drawn)
        found = []
        for given in (values.clone().requires_grad_(), values.clone().requires_grad_()):
            result = theirs(2 * given).wait() if not found else ours(given.split(SAMPLES), lambda part: 2 * part)
            (result * weights).sum().backward()
            found.append((result.detach(), given.grad))
        assert torch.equal(found[0][0], found[1][0]), precision
        assert torch.equal(found[0][1], found[1][1]), precision
    (folder / f"done-{rank}").touch()


@pytest.mark.parametrize("world", [2, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_torchrec(tmp_path, world):
    spawn(compare, world, tmp_path, ["fp32", "fp16", "bf16", "int8"])
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


def follow(folder):
    """The order of what a rank computes, sends and takes in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange, order = PeerExchange(dist.group.WORLD, [2] * world, None), []
    start = exchange.start

    def noted(codec, given, sends, receives):
        order.append(f"to {','.join(str((peer - rank) % world) for peer in sorted(sends))}")
        return start(codec, given, sends, receives)

    exchange.start = noted
    values = torch.stack([torch.full((4, 2), float(peer)) for peer in range(world)]).flatten(0, 1).requires_grad_()

    def compute(part):
        peers = sorted({(int(value) - rank) % world for value in part[:, 0]})
        return Noted.apply(part, order, ",".join(map(str, peers)))

    exchange(values.split(4), compute).sum().backward()
    if rank == 0:
        (folder / "order").write_text("\n".join(order))


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (2, "1 | to 1 | 0 | to 1 | 0 back | 1 back"),
        (3, "1 | to 1 | 2 | to 2 | 0 | to 1 | to 2 | 0 back | 2 back | 1 back"),
    ],
)
def test_what_others_wait_for_is_computed_first_and_differentiated_last(tmp_path, world, expected):
    spawn(follow, world, tmp_path)
    assert (tmp_path / "order").read_text().replace("\n", " | ") == expected


def test_many_ranks_exchange_in_few_pieces(tmp_path):
    spawn(in_pieces, 7, tmp_path)
    assert (tmp_path / "pieces").read_text() == "[[1, 5], [2, 6], [3], [4]]"


def in_pieces(folder):
    exchange = PeerExchange(dist.group.WORLD, [1] * dist.get_world_size(), None)
    if dist.get_rank() == 0:
        (folder / "pieces").write_text(str([exchange.ranks_at(steps, ahead=True) for steps in exchange.pieces]))
