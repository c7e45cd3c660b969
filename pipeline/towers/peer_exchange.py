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

# Pieces begin at multiples of so many samples, whatever their shares, because int8 encodes so many values together.
ALIGNED = 32
# The number of the piece that stays.
OWN = -1


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

    def __call__(self, inputs: Tensor, samples: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the towers' outputs, and return those of all towers for this rank's samples.

        Args:
            inputs: The towers' inputs for the samples of each rank of the group in turn, [ranks * samples, ...].
            samples: Of each rank.
            compute: Gives the outputs of rows, [rows, this rank's width]; is called for a few of them at a time.

        Returns:
            [samples, sum of ``widths``], by rank.
        """
        flight, left = _Flight(self, samples), []
        parts = flight.divide(inputs)
        for number in range(len(flight.pieces)):
            rows = [parts[number, rank] for rank in flight.ahead(number)]
            outputs = compute(rows[0] if len(rows) == 1 else torch.cat(rows))
            left.append(_Leave.apply(flight, number, outputs))
        return cast(Tensor, _Arrive.apply(flight, compute(parts[OWN, self.rank]), *left))

    def gradient_divisor(self) -> int:
        """Return what gradients are divided by, as in TorchRec's exchanges, to be those of the mean of all samples."""
        return self.world if get_gradient_division() else 1

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
    # One exchange there and back. The outputs of a piece go to the ranks ahead, and their gradients come from there.

    def __init__(self, exchange: PeerExchange, samples: int) -> None:
        self.exchange, self.samples = exchange, samples
        # By piece: the steps around the ring, and the rows of each rank's samples.
        self.pieces: list[tuple[range, slice]] = []
        for steps, begin, end in peer_pieces(exchange.world):
            low, high = (int(share * samples) // ALIGNED * ALIGNED for share in (begin, end))
            rows = slice(low, samples if end == 1 else high)
            # All ranks have equally many samples, so they leave out the same pieces.
            if rows.start < rows.stop:
                self.pieces.append((steps, rows))
        self.outputs: list[_InFlight] = []
        self.gradients: dict[int, _InFlight] = {}

    def divide(self, inputs: Tensor) -> dict[tuple[int, int], Tensor]:
        """Split the rows of ``inputs`` by piece and rank; this rank's own are piece ``OWN``."""
        exchange = self.exchange
        sizes = {}
        for rank in range(exchange.world):
            step = (rank - exchange.rank) % exchange.world
            for number, (steps, rows) in enumerate(self.pieces):
                if step in steps:
                    sizes[number, rank] = rows.stop - rows.start
            if step == 0:
                sizes[OWN, rank] = self.samples
        return dict(zip(sizes, inputs.split(list(sizes.values())), strict=True))

    def ahead(self, number: int) -> dict[int, int]:
        """Return, by rank, the values of this rank's towers in a piece, which go there and come back."""
        exchange, (steps, rows) = self.exchange, self.pieces[number]
        ranks = sorted((exchange.rank + step) % exchange.world for step in steps)
        return dict.fromkeys(ranks, (rows.stop - rows.start) * exchange.widths[exchange.rank])

    def behind(self, number: int) -> dict[int, int]:
        """Return, by rank, the values of a piece that come from there, and whose gradients go back."""
        exchange, (steps, rows) = self.exchange, self.pieces[number]
        values = {}
        for rank in sorted((exchange.rank - step) % exchange.world for step in steps):
            values[rank] = (rows.stop - rows.start) * exchange.widths[rank]
        return values


class _Leave(torch.autograd.Function):
    # Sends a piece; its result only says to autograd that ``_Arrive`` depends on it.

    @staticmethod
    def forward(ctx: Any, flight: _Flight, number: int, outputs: Tensor) -> Tensor:
        ctx.flight, ctx.number, ctx.shape = flight, number, outputs.shape
        sends, receives = flight.ahead(number), flight.behind(number)
        flight.outputs.append(flight.exchange.start(flight.exchange.outputs_codec, outputs, sends, receives))
        return outputs.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        flight: _Flight = ctx.flight
        grad = flight.gradients.pop(ctx.number).finish().view(ctx.shape)
        # In place, because the memory is this piece's alone.
        return None, None, grad.div_(flight.exchange.gradient_divisor())


class _Arrive(torch.autograd.Function):
    # Takes in what the other ranks sent, beside this rank's own outputs.

    @staticmethod
    def forward(ctx: Any, flight: _Flight, own: Tensor, *left: Tensor) -> Tensor:
        ctx.flight, exchange = flight, flight.exchange
        result = own.new_empty(flight.samples, sum(exchange.widths), dtype=torch.float32)
        columns = result.split(exchange.widths, dim=1)
        columns[exchange.rank].copy_(_as_sent(exchange.outputs_codec, own))
        for number, ((_, rows), flying) in enumerate(zip(flight.pieces, flight.outputs, strict=True)):
            behind = flight.behind(number)
            for rank, values in zip(behind, flying.finish().split(list(behind.values())), strict=True):
                into = columns[rank][rows]
                into.copy_(values.view_as(into))
        flight.outputs = []
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flight: _Flight = ctx.flight
        exchange = flight.exchange
        columns = grads[0].split(exchange.widths, dim=1)
        # What was computed last is differentiated first.
        for number in reversed(range(len(flight.pieces))):
            sends, receives, rows = flight.behind(number), flight.ahead(number), flight.pieces[number][1]
            given = [columns[rank][rows].contiguous().view(-1) for rank in sends]
            values = given[0] if len(given) == 1 else torch.cat(given)
            flight.gradients[number] = exchange.start(exchange.gradients_codec, values, sends, receives)
        own = _as_sent(exchange.gradients_codec, columns[exchange.rank]) / exchange.gradient_divisor()
        return None, own, *[own.new_empty(0) for _ in flight.pieces]


def _as_sent(codec: Any, values: Tensor) -> Tensor:
    # Returns what another rank would get, so that a sample's outputs do not depend on where their towers are.
    if codec is None:
        return values
    context = codec.create_context()
    return cast(Tensor, codec.decode(codec.encode(values.contiguous().view(-1), context), context)).view_as(values)
