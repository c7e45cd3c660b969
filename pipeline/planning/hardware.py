"""The planned-for hardware: its memories and tiers, the room of one rank, and checks of its figures. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import TIERS, PlanConfig
from pipeline.core.errors import ConfigError
from pipeline.core.units import GIB

# The memories in which bytes are counted; hbm_cached is DDR with a cache in HBM.
MEMORIES = ("hbm", "ddr", "ssd")
KERNEL_OF_TIER = {"hbm": "fused", "hbm_cached": "fused_uvm_caching", "ddr": "fused_uvm", "ssd": "fused"}


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The bytes of each memory that one rank may fill with tables, after reservations."""

    hbm: int
    ddr: int
    ssd: int

    def of(self, memory: str) -> int:
        return int(getattr(self, memory))

    @property
    def each(self) -> tuple[int, int, int]:
        """The bytes in the order of MEMORIES."""
        return self.hbm, self.ddr, self.ssd


def memories(hardware: HardwareConfig) -> tuple[str, ...]:
    """Return the memories of this device, fastest first: HBM on cuda, DDR, and SSD if ``ssd_gib`` is above 0."""
    known = ["ddr"]
    if hardware.device == "cuda":
        known.insert(0, "hbm")
    if hardware.ssd_gib > 0:
        known.append("ssd")
    return tuple(known)


def tiers(hardware: HardwareConfig) -> tuple[str, ...]:
    """Return the tiers that tables may live in on this device, fastest first."""
    present = memories(hardware)
    return tuple(tier for tier in TIERS if tier in present or (tier == "hbm_cached" and "hbm" in present))


def fast_memory(hardware: HardwareConfig) -> str:
    """Return the memory that the device computes from: it holds lookup buffers, caches and the dense part."""
    return "hbm" if hardware.device == "cuda" else "ddr"


def memory_gib(hardware: HardwareConfig, memory: str) -> float:
    """Return the GiB of ``memory`` that one rank has, reserve included."""
    return float(getattr(hardware, f"{memory}_gib"))


def capacity(
    hardware: HardwareConfig, plan: PlanConfig, reserved: Mapping[str, int], host: Mapping[str, int]
) -> Capacity:
    """Compute what one rank may fill with tables.

    Args:
        hardware: The hardware with the memories.
        plan: ``plan.<memory>_reserve`` comes off each memory. TorchRec's own percentage reserves HBM only.
        reserved: Bytes by purpose that come off the fast memory.
        host: Bytes by purpose that come off DDR on a GPU.
    """
    room = {}
    for memory in MEMORIES:
        size = 0
        if memory in memories(hardware):
            share = 1.0 - float(getattr(plan, f"{memory}_reserve"))
            size = int(memory_gib(hardware, memory) * share * GIB)
        if memory == fast_memory(hardware):
            size -= sum(reserved.values())
        room[memory] = max(0, size)
    if hardware.device == "cuda":
        # A checkpoint's copy takes at most half of what the other reservations leave.
        staging = host.get("staging", 0)
        rest = max(0, room["ddr"] - (sum(host.values()) - staging))
        room["ddr"] = rest - min(staging, rest // 2)
    return Capacity(**room)


def kernel_of(hardware: HardwareConfig, tier: str, sharding: str) -> str:
    """Return TorchRec's kernel for a table of ``tier``: always fused on a CPU, dense for a replica."""
    if sharding == "data_parallel":
        return "dense"
    if hardware.device != "cuda":
        # On a CPU all tiers are looked up in host memory, without the kernels of unified memory.
        return "fused"
    return KERNEL_OF_TIER[tier]


# Figures that plans do not name where they are 0.
ABSENT = ("embedding_hosts", "moved_gb_per_s", "operation_us")


def figures(hardware: HardwareConfig) -> dict[str, float]:
    """Return every hardware figure by its name, for ``plan.json``, with those of embedding hosts if there are some."""
    numbers = {}
    for name, value in asdict(hardware).items():
        if isinstance(value, (int, float)) and (name not in ABSENT or value):
            numbers[name] = float(value)
    return numbers


def check_hardware(hardware: HardwareConfig) -> None:
    """Raise ConfigError for the first figure that this hardware needs and that is not above 0."""
    needed = ["ddr_gib", "ddr_gb_per_s", "dense_gflop_per_s", "dense_gb_per_s"]
    if hardware.device == "cuda":
        needed += ["hbm_gib", "hbm_gb_per_s", "hbm_to_ddr_gb_per_s"]
    if hardware.ssd_gib > 0:
        needed += ["ssd_gb_per_s", "ssd_read_iops"]
    if hardware.ranks_per_host > 1:
        needed.append("intra_host_gb_per_s")
    if hardware.hosts > 1 or hardware.only_tables:
        needed.append("inter_host_gb_per_s")
    for name in needed:
        value = float(getattr(hardware, name))
        if value <= 0:
            raise ConfigError(
                f"hardware.{name} is {value:g}, expected more than 0 for {hardware.hosts} x "
                f"{hardware.ranks_per_host} ranks on {hardware.device}",
                hint=f"hardware.{name}=<figure>, or a preset such as hardware=laptop or hardware=h100x8",
            )


def size_text(size: float) -> str:
    """Format bytes for people: GiB, or MiB or KiB where GiB would show as 0.00."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit / 100:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
