"""The semantic-preserving tower transform (DMT, MLSys'24, section 3.1), with inputs instead of outputs permuted.

The ids go to the peers that hold their features, an ordinary sharded collection looks them up on the tower's hosts, the
tower modules compress the embeddings, and their outputs come back to the samples' own ranks.

Gradients are averaged over all ranks, as in the flat model: the way back divides by the number of groups of tower
hosts, and a group's collectives divide by its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import Awaitable, CommOp, NoWait, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.core.errors import ConfigError
from pipeline.embeddings.collection import feature_vectors, penalised, reordered
from pipeline.embeddings.sharding import TableRanks
from pipeline.models.layers.interaction import concat_parts
from pipeline.records.plan import Plan
from pipeline.towers.event_ids import TowerEvents, by_key, by_sample, merge_kjts
from pipeline.towers.layout import TowerLayout
from pipeline.towers.modules import projected_tower
from pipeline.towers.peer_exchange import PeerExchange

Sent: TypeAlias = Awaitable[Awaitable[KeyedJaggedTensor]]
_FORWARD = {"fp16": CommType.FP16, "bf16": CommType.BF16, "int8": CommType.INT8}
# Collectives sum the embeddings of these sharding types on the way, which int8 cannot do.
_SUMMED = ("row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class Groups:
    """This rank's two process groups: its ``tower`` hosts, which share its tables, and its ``peers`` on the others.

    ``number`` is that of its tower hosts.
    """

    number: int
    tower_ranks: tuple[int, ...]
    tower: dist.ProcessGroup
    peers: dist.ProcessGroup


def make_groups(layout: TowerLayout) -> Groups:
    """Make the process groups of ``layout``. Collective."""
    # ``new_group`` is collective over the whole world: every rank makes all groups in the same order, and keeps two.
    tower_groups, peer_groups = [], []
    for group in range(len(layout.tower_hosts)):
        tower_groups.append(dist.new_group(layout.tower_ranks(group)))
    rank = dist.get_rank()
    number = layout.tower_hosts_of(rank)
    tower_ranks = layout.tower_ranks(number)
    # All groups of tower hosts have equally many ranks.
    for position in range(len(tower_ranks)):
        peer_groups.append(dist.new_group(layout.peers(position)))
    return Groups(number, tuple(tower_ranks), tower_groups[number], peer_groups[tower_ranks.index(rank)])


class TowerEmbeddings(nn.Module):
    """forward(ids of this rank's samples) -> all towers' outputs for them: [b, V, dim].

    Every rank holds the modules of all towers but trains only those of its hosts. ``names`` [V] says what the vectors
    are: if a tower outputs one per feature, they are in the order of ``widths`` (those of all features' embeddings), as
    in the flat model. ``width`` is that of the model; a tower projects its features' embeddings to it. ``dtype`` is
    what the modules compute in (None: float32). ``penalty`` is the factor of the L2 penalty on embeddings. ``events``
    has sequences, each of which becomes one more vector of the tower that has its tables. In ``widths`` they follow the
    features.
    """

    def __init__(
        self,
        layout: TowerLayout,
        groups: Groups,
        collection: EmbeddingBagCollection,
        widths: Mapping[str, int],
        width: int,
        seed: int,
        codecs: QuantizedCommCodecs | None = None,
        dtype: torch.dtype | None = None,
        events: TowerEvents | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.groups, self.dtype, self._width = layout, groups, dtype, width
        self.collection = collection if len(collection.embedding_bags) else None
        features_here = layout.tower_hosts[groups.number].features
        # The modules of sequences are at the flat model's path, where checkpoints and versions look for them.
        self._events = events
        self.event_tables = events.tables if events is not None and events.blocks is not None else None
        self.penalty = 0.0
        spec = layout.towers.module
        features, self.even = list(widths), set(widths.values()) <= {width}
        self._widths = {name: widths[name] for name in features_here}
        towers = []
        for number, tower in enumerate(layout.towers.towers):
            tower_widths = {name: widths[name] for name in tower.features}
            towers.append(projected_tower(spec, tower_widths, width, seed, number, even=self.even))
        self.tower = nn.ModuleList(towers)
        self.dim = towers[0].dim
        columns = events.columns if events is not None else {}
        self._pooled = [name for name in features_here if name not in columns]
        # For each group of tower hosts, the keys sent there and the width of what comes back.
        self._keys: list[str] = []
        key_counts, sizes = [], []
        for group in layout.tower_hosts:
            first = len(self._keys)
            for name in group.features:
                self._keys += columns.get(name, [name])
            key_counts.append(len(self._keys) - first)
            sizes.append(self.dim * sum(towers[number].vectors for number in group.towers))
        self._found = layout.vectors
        self.names = tuple(features) if spec.by_feature else self._found
        self._send = KJTAllToAll(groups.peers, key_counts)
        self.exchange = PeerExchange(groups.peers, sizes, codecs)

    def table_ranks(self, path: str) -> TableRanks:
        """Return the ranks that share this rank's tables and average its towers; ``path`` is this module's."""
        return TableRanks(self.groups.tower_ranks, self.groups.tower, unshared=(f"{path}.tower.",))

    @property
    def own_hosts(self) -> tuple[int, ...]:
        """The hosts that share this rank's tables."""
        return self.layout.tower_hosts[self.groups.number].hosts

    @property
    def read_as(self) -> torch.dtype | None:
        """The dtype to which tower modules round embeddings before anything else reads them; None: no rounding."""
        by_a_product = self.layout.towers.module.rounds_first and self.even and self._events is None
        # A penalty reads them in float32, before any product does.
        if by_a_product and not self.penalty:
            return self.dtype
        return None

    def module_features(self, path: str) -> dict[str, list[str]]:
        """Return the features of each tower by the prefix of its module's parameter names; ``path`` is this module's.

        Empty if no module has parameters. If some have, the others count too, since they hold the rest.
        """
        features: dict[str, list[str]] = {}
        if next(self.tower.parameters(), None) is not None:
            for number, tower in enumerate(self.layout.towers.towers):
                features[f"{path}.tower.{number}."] = list(tower.features)
        return features

    def parameters_of(self, group: int) -> list[nn.Parameter]:
        """Return the parameters that the ranks of tower hosts ``group`` train, of modules and sequences."""
        hosts = self.layout.tower_hosts[group]
        parameters: list[nn.Parameter] = []
        for number in hosts.towers:
            parameters += self.tower[number].parameters()
        if self._events is not None:
            for name in hosts.features:
                if name in self._events.vectors:
                    parameters += self._events.vectors[name].parameters()
        return parameters

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of towers that this rank trains."""
        return self.parameters_of(self.groups.number)

    def unshared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all towers, which only the ranks of some hosts train."""
        parameters: list[nn.Parameter] = []
        for group in range(len(self.layout.tower_hosts)):
            parameters += self.parameters_of(group)
        return parameters

    @torch.no_grad()
    def send(
        self, ids: KeyedJaggedTensor, lookups: KeyedJaggedTensor | None = None, events: Sequence[Tensor] = ()
    ) -> Sent:
        """Start sending ids to the ranks that hold their tables: after the first wait lengths are known and ids leave,
        after the second they are there, for all peers' samples: F of its tower hosts x (groups * b).

        ``lookups`` and ``events`` are those of sequences, as ``training.batches.Batch`` has them.
        """
        if self._events is not None and lookups is not None:
            samples = ids.stride()
            weighted = ids.weights_or_none() is not None or lookups.weights_or_none() is not None
            parts = by_key(ids) | by_sample(self._events.every, lookups, samples, events)
            ids = merge_kjts(parts, self._keys, samples, weighted=weighted)
        elif self._keys != ids.keys():
            ids = ids.permute(list(map(ids.keys().index, self._keys)))
        if len(self.layout.tower_hosts) == 1:
            # This rank is its only peer, so nothing is sent.
            return NoWait(NoWait(ids))
        return cast(Sent, self._send(ids))

    def forward(
        self,
        ids: KeyedJaggedTensor,
        received: KeyedJaggedTensor | None = None,
        weights: Tensor | None = None,
        lookups: KeyedJaggedTensor | None = None,
        events: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return [b, V, dim] float32 for ``ids``.

        Args:
            ids: The ids of this rank's samples.
            received: The ids that ``send`` brought, if it was called ahead.
            weights: [b], the samples' weights as in ``Batch``, for the shares of an L2 penalty; None outside of
                training.
            lookups: As in ``send``, as are ``events``.
            events: The sample of each event.
        """
        if received is None:
            received = self.send(ids, lookups, events).wait().wait()
        embeddings = self._embeddings(received, weights)
        if len(self.layout.tower_hosts) == 1:
            vectors = self._compress(embeddings)
        else:
            vectors = self.exchange(embeddings, ids.stride(), self._compress)
        return reordered(vectors.unflatten(1, (-1, self.dim)), self._found, self.names)

    def _compress(self, embeddings: Tensor) -> Tensor:
        # Runs this rank's towers: [B, F of its tower hosts, N] -> [B, V of its tower hosts * dim] float32; if tables
        # differ in width, from [B, sum of widths].
        numbers = self.layout.tower_hosts[self.groups.number].towers
        sizes = []
        for number in numbers:
            features = self.layout.towers.towers[number].features
            sizes.append(len(features) if self.even else sum(self._widths[name] for name in features))
        outputs = []
        with torch.autocast(embeddings.device.type, self.dtype, enabled=self.dtype is not None):
            for number, part in zip(numbers, embeddings.split(sizes, dim=1), strict=True):
                outputs.append(self.tower[number](part).float())
        return concat_parts(outputs).flatten(1)

    def _embeddings(self, mine: KeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        # Returns the inputs of this rank's towers, [B, F of its tower hosts, N], or side by side if tables differ in
        # width.
        if self._events is None or self._events.blocks is None or self.event_tables is None:
            assert self.collection is not None
            return self._penalised(feature_vectors(self.collection(mine), None, self._pooled, even=self.even), weights)
        samples, parts, blocks = mine.stride(), by_key(mine), self._events.blocks
        # 1. Look up the tables of events first: they also give pooled features, and the other tables give the rest.
        lookup, places = self._events.lookup(parts, samples)
        taken = blocks.take(self.event_tables(lookup), samples, places)
        pooled = None
        if self.collection is not None:
            plain = [name for name in self._pooled if name not in taken.pooled]
            pooled = self.collection(merge_kjts(parts, plain, samples, weighted=mine.weights_or_none() is not None))
        # 2. Join all pooled features; a tower of sequences alone has none.
        if self._pooled:
            features = feature_vectors(pooled, taken.pooled, self._pooled, even=self.even)
        elif self.even:
            features = torch.zeros((samples, 0, self._width), device=lookup.device())
        else:
            features = torch.zeros((samples, 0), device=lookup.device())
        features = self._penalised(features, weights)
        # 3. Encode each sequence to one vector: [B, S, D].
        with torch.autocast(features.device.type, self.dtype, enabled=self.dtype is not None):
            vectors = blocks(taken, places)
        # 4. Join both, in the order of this rank's towers.
        sequences = [name for name in self._widths if name not in self._pooled]
        if self.even:
            sizes, by_sequence = [1] * len(self._pooled), vectors.split(1, dim=1)
        else:
            sizes, by_sequence = [self._widths[name] for name in self._pooled], vectors.unbind(1)
        columns = dict(zip(self._pooled, features.split(sizes, dim=1), strict=True))
        columns |= zip(sequences, by_sequence, strict=True)
        return torch.cat([columns[name] for name in self._widths], dim=1)

    def _penalised(self, embeddings: Tensor, weights: Tensor | None) -> Tensor:
        if not self.penalty or weights is None or not torch.is_grad_enabled():
            return embeddings
        # Gather the weights of all samples that this rank's towers see, which are their parts of a mean over the peers.
        peers = dist.get_world_size(self.groups.peers)
        peer_weights = weights.new_empty(peers * len(weights))
        dist.all_gather_into_tensor(peer_weights, weights, group=self.groups.peers)
        return penalised(embeddings, self.penalty * (peer_weights / peers))

    def reduce_gradients(self) -> None:
        """Average the gradients of this rank's tower modules over the ranks of its tower hosts only. Collective."""
        grads = [p.grad for p in self.own_parameters() if p.grad is not None]
        if not grads or dist.get_world_size(self.groups.tower) == 1:
            return
        # Use one collective for all gradients, so that the latency of the links is paid only once.
        flat = torch.cat(list(map(torch.flatten, grads)))
        dist.all_reduce(flat, group=self.groups.tower)
        flat /= dist.get_world_size(self.groups.tower)
        first = 0
        for grad in grads:
            grad.copy_(flat[first : first + grad.numel()].view_as(grad))
            first += grad.numel()


def exchange_codecs(exchange: str) -> QuantizedCommCodecs | None:
    """Return codecs for an all-to-all of pooled embeddings by ``partition.exchange``; None: plain float32.

    TorchRec's registry turns bf16 into fp16 on a CPU, with a line in the log. The codecs themselves work, so they are
    built here without the registry. Gradients always travel in bf16, since fp16 has no room for the small ones of a
    large batch.
    """
    if exchange == "fp32":
        return None
    return get_qcomm_codecs(QCommsConfig(forward_precision=_FORWARD[exchange], backward_precision=CommType.BF16))


def flat_exchange_codecs(exchange: str, plan: Plan) -> dict[str, QuantizedCommCodecs] | None:
    """Return codecs of a flat model's collectives, by TorchRec's names; ConfigError names tables without support."""
    operations = [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name]
    if exchange != "int8":
        operations.append(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
    else:
        summed = [name for name, table in plan.tables.items() if table.sharding in _SUMMED]
        if summed:
            raise ConfigError(
                f"partition.exchange is int8, but the row-wise tables {', '.join(summed)} need sums on the way, which "
                "int8 cannot do",
                hint="partition.exchange=bf16, or plan.sharding_types=[data_parallel,table_wise,column_wise]",
            )
    made = {}
    for operation in operations:
        codecs = exchange_codecs(exchange)
        if codecs is None:
            return None
        made[operation] = codecs
    return made
