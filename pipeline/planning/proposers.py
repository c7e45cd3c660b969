"""Proposers beside TorchRec's own: a short ladder that scales to 1,000 tables, and a limit for long ones."""

from __future__ import annotations

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Storage, Topology


class Bounded(Proposer):
    """Another proposer, stopped after ``limit`` proposals: a deterministic stand-in for a time limit."""

    def __init__(self, proposer: Proposer, limit: int) -> None:
        self._proposer = proposer
        self._limit = limit
        self._given = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Start again over ``search_space``."""
        self._given = 0
        self._proposer.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """The inner proposer's next plan, None once the limit is reached."""
        return self._proposer.propose() if self._given < self._limit else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Counts the proposal and passes the feedback on."""
        self._given += 1
        self._proposer.feedback(partitionable, plan, perf_rating, storage_constraint)


class LadderProposer(Proposer):
    """The k largest tables take the least memory a rank, the others their fastest option, for k = 0, 1, 2, 4, ...

    ``spreads`` gives the options of least memory; the others start from every type or from unsplit tables. The last
    rungs are the spreads themselves, so a plan is found wherever one of them fits.
    """

    def __init__(self, room: Storage) -> None:
        self._room = room
        self._proposals: list[list[ShardingOption]] = []
        self._next = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Lay out all rungs: about 12 log2(tables) of them on a GPU, 4 log2(tables) on a CPU."""
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.name, []).append(option)
        self._next = 0
        self._proposals = ladders(by_table, self._room)

    def propose(self) -> list[ShardingOption] | None:
        """The next rung, None after the last."""
        return self._proposals[self._next] if self._next < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Climb to the next rung, whatever the feedback."""
        self._next += 1


def ladders(by_table: dict[str, list[ShardingOption]], room: Storage) -> list[list[ShardingOption]]:
    """All rungs, each with one option for every table in ``by_table``'s order."""
    starts = [
        {name: min(options, key=slowest_shard) for name, options in by_table.items()},
        {name: min(options, key=lambda o: (o.num_shards, slowest_shard(o))) for name, options in by_table.items()},
    ]
    largest = sorted(by_table, key=lambda name: -table_bytes(by_table[name][0]))
    rungs = [0, *(2**i for i in range(len(largest).bit_length()) if 2**i < len(largest)), len(largest)]
    proposals = []
    for spread in spreads(by_table, room):
        for start in starts:
            for k in rungs:
                chosen = set(largest[:k])
                proposals.append([spread[name] if name in chosen else start[name] for name in by_table])
    return proposals


def spreads(by_table: dict[str, list[ShardingOption]], room: Storage) -> list[dict[str, ShardingOption]]:
    """Options of little memory, two sets for each kernel (fused, UVM with a cache, UVM; any where a table lacks it).

    The first takes the least memory in all, but splits tables whose shard would fill half of a rank's ``room``: a
    row-wise table keeps a whole batch's output on every rank, too much for many tables. The second splits every table.
    """
    kernels = sorted({o.compute_kernel for options in by_table.values() for o in options} - {"dense"})
    ways = []
    for kernel in kernels or ["dense"]:
        same = {
            name: [o for o in options if o.compute_kernel == kernel] or options for name, options in by_table.items()
        }
        thin = {name: min(o, key=lambda x: (largest_shard(x), slowest_shard(x))) for name, o in same.items()}
        least = {name: min(o, key=lambda x: (_total(x), slowest_shard(x))) for name, o in same.items()}
        mixed = {name: least[name] if _fits_half(least[name], room) else thin[name] for name in by_table}
        ways += [mixed, thin] if mixed != thin else [thin]
    return ways


def slowest_shard(option: ShardingOption) -> float:
    """Predicted ms of the option's slowest shard."""
    return max(shard.perf.total for shard in option.shards if shard.perf)


def largest_shard(option: ShardingOption) -> int:
    """Bytes (HBM and DDR together) of the option's largest shard."""
    return max(shard.storage.hbm + shard.storage.ddr for shard in option.shards if shard.storage)


def _fits_half(option: ShardingOption, room: Storage) -> bool:
    sizes = [shard.storage for shard in option.shards if shard.storage]
    return all(2 * size.hbm <= room.hbm and 2 * size.ddr <= room.ddr for size in sizes)


def _total(option: ShardingOption) -> int:
    return option.total_storage.hbm + option.total_storage.ddr


def table_bytes(option: ShardingOption) -> int:
    """Bytes of the table's weights, however they are sharded."""
    return option.tensor.numel() * option.tensor.element_size()
