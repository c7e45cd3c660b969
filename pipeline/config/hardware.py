"""The ``hardware`` group: the machines that are planned for and trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass(kw_only=True)
class HardwareConfig:
    """The topology planned for and trained on. Capacities per rank in GiB, bandwidths per rank in GB/s.

    ``device``: cpu | cuda. The world size is ``hosts * ranks_per_host``. ``ssd_read_iops``: random reads of 4 KiB
    per second and rank at depth 32. ``*_latency_us``: a small collective within a host and between hosts.
    ``dense_gflop_per_s``: rate of the dense part's products, forward and backward; ``dense_gb_per_s``: of everything
    else it does, as float32 bytes of its activations. ``lookup_ns``, ``update_ns``: fixed cost of one id in lookup and
    update, beside its bytes; ``table_overhead_us``: of one table, both together; ``step_overhead_ms``: of a step.
    ``process_gib``: host memory of a rank's process before training. ``nightjar calibrate`` measures all of these.
    ``ssd_paths``: directories on local disks for the scratch files of tables on tier ssd, a disk each (none: directory
    ``scratch`` of a local store); they decide nothing of the plan.
    """

    name: str = MISSING
    device: str = "cpu"
    hosts: int = 1
    ranks_per_host: int = 1
    hbm_gib: float = 0.0
    ddr_gib: float = 8.0
    ssd_gib: float = 0.0
    process_gib: float = 0.34375
    hbm_gb_per_s: float = 0.0
    ddr_gb_per_s: float = 20.0
    ssd_gb_per_s: float = 1.0
    hbm_to_ddr_gb_per_s: float = 0.0
    intra_host_gb_per_s: float = 2.0
    inter_host_gb_per_s: float = 1.0
    ssd_read_iops: float = 50_000.0
    intra_host_latency_us: float = 200.0
    inter_host_latency_us: float = 300.0
    dense_gflop_per_s: float = 300.0
    dense_gb_per_s: float = 3.0
    lookup_ns: float = 5.0
    update_ns: float = 18.0
    table_overhead_us: float = 20.0
    step_overhead_ms: float = 4.0
    ssd_paths: list[str] = field(default_factory=list)
