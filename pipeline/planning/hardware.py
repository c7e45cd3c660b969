"""The planned-for topology as plain figures: bytes per rank, bytes per millisecond, and checks on both.

No torch here: what-if and calibration tools read hardware without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config, HardwareConfig
from pipeline.errors import ConfigError

GIB = 2**30
BYTES_PER_MS = 1e6  # 1 GB/s in bytes per millisecond


# TorchRec's kernels that need no host memory, and those that keep a table in DDR for a GPU to read.
DEVICE_KERNELS = ("fused", "dense")
HOST_KERNELS = ("fused_uvm_caching", "fused_uvm")
TIER_OF_KERNEL = {"fused": "hbm", "dense": "hbm", "fused_uvm_caching": "hbm_cached", "fused_uvm": "ddr"}


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes of each tier that one rank may fill with tables, ``plan.reserve`` already taken off."""

    hbm: int
    ddr: int

    def of(self, tier: str) -> int:
        """Bytes of ``tier`` (hbm or ddr)."""
        return self.hbm if tier == "hbm" else self.ddr


def tiers(hardware: HardwareConfig) -> tuple[str, ...]:
    """The tiers that tables may live in on this device, fastest first."""
    return ("hbm", "ddr") if hardware.device == "cuda" else ("ddr",)


def tier_gib(hardware: HardwareConfig, tier: str) -> float:
    """GiB of ``tier`` that one rank has, reserve included."""
    return hardware.hbm_gib if tier == "hbm" else hardware.ddr_gib


def capacity(config: Config) -> Capacity:
    """What one rank may fill. TorchRec's own percentage reserves HBM only, so both tiers are reserved here."""
    share = 1.0 - config.plan.reserve
    hardware = config.hardware
    hbm = hardware.hbm_gib if hardware.device == "cuda" else 0.0
    return Capacity(hbm=int(hbm * share * GIB), ddr=int(hardware.ddr_gib * share * GIB))


def tier_of(hardware: HardwareConfig, kernel: str) -> str:
    """The tier that a table under TorchRec's ``kernel`` lives in; a CPU knows DDR only."""
    return TIER_OF_KERNEL[kernel] if hardware.device == "cuda" else "ddr"


def check_hardware(hardware: HardwareConfig) -> None:
    """Every figure that this device and shape need is positive; raises ConfigError naming the first that is not."""
    needed = ["ddr_gib", "ddr_gb_per_s"]
    if hardware.device == "cuda":
        needed += ["hbm_gib", "hbm_gb_per_s", "hbm_to_ddr_gb_per_s"]
    if hardware.ranks_per_host > 1:
        needed.append("intra_host_gb_per_s")
    if hardware.hosts > 1:
        needed.append("inter_host_gb_per_s")
    for name in needed:
        value = float(getattr(hardware, name))
        if value <= 0:
            raise ConfigError(
                f"hardware.{name} is {value:g}, expected more than 0 for {hardware.hosts} x "
                f"{hardware.ranks_per_host} ranks on {hardware.device}",
                hint=f"hardware.{name}=<figure>, or a preset such as hardware=laptop or hardware=h100x8",
            )
