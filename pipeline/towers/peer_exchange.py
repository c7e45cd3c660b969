"""Exchanges the outputs of towers between peers while towers still compute.

A tower sees the samples of all its peers and sends each of them its part. Nothing of what it computes depends on other
samples, so what others wait for is computed first and leaves at once, and this rank's own samples come last, while the
network is busy. In the backward pass autograd runs what was computed last first: the gradients of the other samples
travel while the towers differentiate this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import QuantizedCommCodecs

from pipeline.towers.layout import peer_pieces


@dataclass
class _InFlight:
    # Messages under way, with the memory that they are read from and written to.
    works: list[Any]
    given: Tensor
    received: Tensor
    codec: Any
    context: Any

    def finish(self) -> Tensor:
        # Waits, and returns the values that arrived, one after the other in the order of ranks.
        for work in self.works:
            work.wait()
        if self.codec is None:
            return self.received
        return cast(Tensor, self.codec.decode(self.received, self.context))


class PeerExchange:
    """Sends outputs of this rank's towers to the ranks of ``group`` that have the samples, and takes those of theirs.

    ``widths`` are the values that a sample gets from each rank's towers. ``codecs`` encode what travels; None: float32.
    """

    def __init__(self, group: dist.ProcessGroup, widths: Sequence[int], codecs: QuantizedCommCodecs | None) -> None:
        self.widths, self._group = list(widths), group
        self.outputs_codec = codecs.forward if codecs is not None else None
        self.gradients_codec = codecs.backward if codecs is not None else None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # Gets the bytes sent to each rank, which no collective of ``dist`` sees.
        self.counted: Callable[[Sequence[int], dist.ProcessGroup | None], None] | None = None
        self.pieces = peer_pieces(self.world)

    def __call__(self, parts: Sequence[Tensor], compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the outputs of ``parts``, and return those of all towers for this rank's samples.

        Args:
            parts: For each rank of the group, the towers' inputs for its samples, [b, ...].
            compute: Gives the outputs of rows, [rows, this rank's width]; is called for a few parts at a time.

        Returns:
            [b, sum of ``widths``], by rank.
        """
        flight = _Flight(self, len(parts[self.rank]))
        left = []
        for number, steps in enumerate(self.pieces):
            rows = [parts[peer] for peer in self.ranks_at(steps, ahead=True)]
            outputs = compute(rows[0] if len(rows) == 1 else torch.cat(rows))
            left.append(_Leave.apply(flight, number, outputs))
        return cast(Tensor, _Arrive.apply(flight, compute(parts[self.rank]), *left))

    def ranks_at(self, steps: range, *, ahead: bool) -> list[int]:
        """Return the ranks that are so many ``steps`` ahead of this one around the ring, or behind, in their order."""
        sign = 1 if ahead else -1
        return sorted((self.rank + sign * step) % self.world for step in steps)

    def start(self, codec: Any, given: Tensor, sends: Mapping[int, int], receives: Mapping[int, int]) -> _InFlight:
        """Start to send ``given``, so many values to each rank of ``sends``, and to take so many from each of others.

        Ranks are in ascending order. They are told what this one waits for before it sends anything: gloo has one queue
        for all that goes to a rank, in which that word would wait behind the values, and the other rank's values for
        it. So does its all-to-all, which fills a link in one direction at a time.
        """
        context = codec.create_context() if codec is not None else None
        given = given.contiguous().view(-1)
        sent, taken = list(sends.values()), list(receives.values())
        if codec is not None:
            given = codec.encode(given, context)
            sent = [codec.calc_quantized_size(count, context) for count in sent]
            taken = [codec.calc_quantized_size(count, context) for count in taken]
        received = given.new_empty(sum(taken))
        messages: list[tuple[Callable[..., Any], Tensor, int]] = []
        for rank, part in zip(receives, received.split(taken), strict=True):
            messages.append((dist.irecv, part, rank))
        for rank, part in zip(sends, given.split(sent), strict=True):
            messages.append((dist.isend, part, rank))
        operations = []
        for operation, part, rank in messages:
            # Where a rank's towers have no outputs, neither side has anything to do.
            if part.numel():
                operations.append(dist.P2POp(operation, part, group=self._group, group_peer=rank))
        if self.counted is not None:
            by_rank = dict(zip(sends, sent, strict=True))
            self.counted([by_rank.get(rank, 0) * given.itemsize for rank in range(self.world)], self._group)
        works = dist.batch_isend_irecv(operations) if operations else []
        return _InFlight(works, given, received, codec, context)


class _Flight:
    # One exchange there and back: what is under way, by piece. The outputs of a piece go to the ranks ahead, and their
    # gradients come from there.

    def __init__(self, exchange: PeerExchange, samples: int) -> None:
        self.exchange, self.samples = exchange, samples
        self.outputs: list[_InFlight] = []
        self.gradients: dict[int, _InFlight] = {}

    def neighbours(self, number: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return, by rank, the values of a piece that go ahead or come back, and those that come from behind."""
        exchange, steps = self.exchange, self.exchange.pieces[number]
        here = self.samples * exchange.widths[exchange.rank]
        ahead = dict.fromkeys(exchange.ranks_at(steps, ahead=True), here)
        behind = {}
        for rank in exchange.ranks_at(steps, ahead=False):
            behind[rank] = self.samples * exchange.widths[rank]
        return ahead, behind


class _Leave(torch.autograd.Function):
    # Sends a piece; its result only says to autograd that ``_Arrive`` depends on it.

    @staticmethod
    def forward(ctx: Any, flight: _Flight, number: int, outputs: Tensor) -> Tensor:
        ctx.flight, ctx.number, ctx.shape = flight, number, outputs.shape
        exchange = flight.exchange
        ahead, behind = flight.neighbours(number)
        flight.outputs.append(exchange.start(exchange.outputs_codec, outputs, ahead, behind))
        return outputs.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        flight: _Flight = ctx.flight
        grad = flight.gradients.pop(ctx.number).finish().view(ctx.shape)
        return None, None, _averaged(grad, flight.exchange)


class _Arrive(torch.autograd.Function):
    # Takes in what the other ranks sent, beside this rank's own outputs.

    @staticmethod
    def forward(ctx: Any, flight: _Flight, own: Tensor, *left: Tensor) -> Tensor:
        ctx.flight, exchange = flight, flight.exchange
        found = {exchange.rank: _as_sent(exchange.outputs_codec, own)}
        for number, flying in enumerate(flight.outputs):
            _, behind = flight.neighbours(number)
            found |= zip(behind, flying.finish().split(list(behind.values())), strict=True)
        flight.outputs = []
        return torch.cat([found[rank].view(flight.samples, -1) for rank in range(exchange.world)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flight: _Flight = ctx.flight
        exchange = flight.exchange
        columns = grads[0].split(exchange.widths, dim=1)
        # What was computed last is differentiated first.
        for number in reversed(range(len(exchange.pieces))):
            ahead, behind = flight.neighbours(number)
            given = [columns[rank].contiguous().view(-1) for rank in behind]
            values = given[0] if len(given) == 1 else torch.cat(given)
            flight.gradients[number] = exchange.start(exchange.gradients_codec, values, behind, ahead)
        own = _averaged(_as_sent(exchange.gradients_codec, columns[exchange.rank]), exchange)
        return None, own, *[own.new_empty(0) for _ in exchange.pieces]


def _as_sent(codec: Any, values: Tensor) -> Tensor:
    # Returns what another rank would get, so that a sample's outputs do not depend on where their towers are.
    if codec is None:
        return values
    context = codec.create_context()
    return cast(Tensor, codec.decode(codec.encode(values.contiguous().view(-1), context), context)).view_as(values)


def _averaged(grad: Tensor, exchange: PeerExchange) -> Tensor:
    # Divides as TorchRec's exchanges do, so that gradients are those of the mean over all samples.
    return grad / exchange.world if get_gradient_division() else grad
