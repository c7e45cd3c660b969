"""The ``hardware`` group: the machines that are planned for and trained on."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError

# Figures that embedding hosts may set separately, as ``embedding_<name>``.
OF_EMBEDDING_HOSTS = ("ddr_gib", "ddr_gb_per_s", "lookup_ns", "update_ns")


@dataclass(kw_only=True)
class HardwareConfig:
    """The hosts, their memory and their speed. The world size is ``hosts * ranks_per_host``.

    ``nightjar calibrate`` measures the bandwidths, rates and costs on this machine. In a file, ``device: auto``, no
    ranks and a figure of ``.nan`` stand for what this machine has (``compose.hardware``).
    """

    name: str = setting(MISSING, doc="Name of this hardware in messages and reports.")
    device: str = setting("cpu", choices=("cpu", "cuda"), doc="Device that ranks train on.")
    measured: list[str] = setting(
        factory=list,
        quiet=True,
        doc="Figures that the plan stage measures on its machine, once, and keeps; their values here are not used. "
        "`hardware=auto` sets it.",
    )
    hosts: int = setting(1, low=1, doc="Number of hosts.")
    ranks_per_host: int = setting(1, low=1, doc="Number of ranks on each host; with cuda, of GPUs.")
    embedding_hosts: int = setting(
        0,
        low=0,
        quiet=True,
        doc="Of `hosts`, the last ones that hold the embedding tables and read no samples; the other hosts, the "
        "workers, train the dense part and hold no tables. Embedding hosts use CPUs on any `device`. 0: every host "
        "does both.",
    )
    embedding_ddr_gib: float | None = setting(
        None, low=0.0, quiet=True, doc="Host memory of a rank on an embedding host, in GiB; null: `ddr_gib`."
    )
    embedding_ddr_gb_per_s: float | None = setting(
        None,
        low=0.0,
        quiet=True,
        doc="Bandwidth of the host memory of a rank on an embedding host, in GB/s; null: `ddr_gb_per_s`.",
    )
    embedding_lookup_ns: float | None = setting(
        None, low=0.0, quiet=True, doc="`lookup_ns` of a rank on an embedding host; null: `lookup_ns`."
    )
    embedding_update_ns: float | None = setting(
        None, low=0.0, quiet=True, doc="`update_ns` of a rank on an embedding host; null: `update_ns`."
    )
    hbm_gib: float = setting(0.0, low=0.0, doc="GPU memory of a rank, in GiB; 0: none.")
    ddr_gib: float = setting(8.0, low=0.0, doc="Host memory of a rank, in GiB.")
    ssd_gib: float = setting(0.0, low=0.0, doc="Local disk space of a rank for tables on SSD, in GiB; 0: none.")
    ssd_spare: float = setting(
        0.2,
        low=0.02,
        high=0.5,
        quiet=True,
        doc="Share of the disk space of rows on SSD that stays free, for rows that leave memory. The less is free, the "
        "more bytes are written to make room, for each byte that leaves memory: about 3.2 with 0.1, 2.1 with 0.2, 1.7 "
        "with 0.3.",
    )
    process_gib: float = setting(
        0.34375, low=0.0, doc="Host memory that a rank's process takes before training starts, in GiB."
    )
    hbm_gb_per_s: float = setting(0.0, low=0.0, doc="Bandwidth of a rank's GPU memory, in GB/s.")
    ddr_gb_per_s: float = setting(20.0, low=0.0, doc="Bandwidth of a rank's host memory, in GB/s.")
    ssd_gb_per_s: float = setting(1.0, low=0.0, doc="Bandwidth of a rank's local disk, in GB/s.")
    hbm_to_ddr_gb_per_s: float = setting(
        0.0, low=0.0, doc="Bandwidth between a rank's GPU memory and host memory, in GB/s."
    )
    intra_host_gb_per_s: float = setting(2.0, low=0.0, doc="Bandwidth between ranks of one host, in GB/s per rank.")
    inter_host_gb_per_s: float = setting(1.0, low=0.0, doc="Bandwidth between hosts, in GB/s per rank.")
    ssd_read_iops: float = setting(
        50_000.0, low=0.0, doc="Random reads of 4 KiB per second from a rank's disk, at depth 32."
    )
    intra_host_latency_us: float = setting(
        200.0, low=0.0, doc="Time of a small collective within a host, in microseconds."
    )
    inter_host_latency_us: float = setting(
        300.0, low=0.0, doc="Time of a small collective between hosts, in microseconds."
    )
    dense_gflop_per_s: float = setting(
        300.0, low=0.0, doc="Rate of the dense part's matrix products, forward and backward, in GFLOP/s."
    )
    dense_gb_per_s: float = setting(
        3.0,
        low=0.0,
        doc="Rate of the rest of the dense part, in GB/s of its activations as float32, where `moved_gb_per_s` is 0.",
    )
    moved_gb_per_s: float = setting(
        0.0,
        low=0.0,
        quiet=True,
        doc="Rate at which the dense part's operations other than matrix products, and its optimizer, read and write, "
        "in GB/s of float32. `nightjar calibrate` and `hardware=auto` measure it. 0: not known, so "
        "`dense_gb_per_s` counts in its place.",
    )
    operation_us: float = setting(
        0.0,
        low=0.0,
        quiet=True,
        doc="Fixed cost of an operation of the dense part, in microseconds; a matrix product counts as five.",
    )
    lookup_ns: float = setting(
        5.0, low=0.0, doc="Fixed cost of looking up one id, in nanoseconds; reading its row comes on top."
    )
    update_ns: float = setting(
        18.0, low=0.0, doc="Fixed cost of updating the row of one id, in nanoseconds; moving it comes on top."
    )
    table_overhead_us: float = setting(
        20.0, low=0.0, doc="Fixed cost of a table per step, lookup and update together, in microseconds."
    )
    step_overhead_ms: float = setting(4.0, low=0.0, doc="Fixed cost of a step, in milliseconds.")
    ssd_paths: list[str] = setting(
        factory=list,
        doc="Directories for the scratch files of tables on SSD, one per local disk; []: `scratch` in a local store. "
        "The plan does not depend on them.",
    )
    cache_path: str | None = setting(
        None,
        quiet=True,
        doc="Directory on a disk of each host that keeps what ranks fetch of datasets in an object store, for later "
        "epochs, stages and runs; null: nothing is kept. A local store needs none.",
    )
    cache_gib: float = setting(
        64.0,
        low=0.0,
        quiet=True,
        doc="Most bytes in `cache_path`, in GiB; the oldest parts of files make room for new ones.",
    )

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def workers(self) -> int:
        """The ranks that have samples, the first ones: all of them without embedding hosts."""
        return (self.hosts - self.embedding_hosts) * self.ranks_per_host

    def ddr_gib_of(self, rank: int) -> float:
        """Return the host memory of global ``rank``, in GiB."""
        # Ranks of embedding hosts are the last ones.
        if rank >= self.workers and self.embedding_ddr_gib is not None:
            return self.embedding_ddr_gib
        return self.ddr_gib

    @property
    def only_tables(self) -> bool:
        """Whether these are a cluster's embedding hosts, which planning treats separately from the workers."""
        return 0 < self.embedding_hosts == self.hosts

    @property
    def table_device(self) -> str:
        """The device that looks rows up."""
        return "cpu" if self.embedding_hosts else self.device

    def check(self, path: str) -> None:
        # Some host must train, and settings of embedding hosts need such hosts.
        if self.embedding_hosts and self.embedding_hosts >= self.hosts:
            raise ConfigError(
                f"{path}.embedding_hosts is {self.embedding_hosts} of {path}.hosts={self.hosts}, expected fewer: the "
                "other hosts read the samples and train the dense part",
                hint=f"{path}.hosts={2 * self.embedding_hosts}, or {path}.embedding_hosts={self.hosts - 1}",
            )
        for name in OF_EMBEDDING_HOSTS:
            if not self.embedding_hosts and getattr(self, f"embedding_{name}") is not None:
                raise ConfigError(
                    f"{path}.embedding_{name} is set, but {path}.embedding_hosts is 0: every host holds tables",
                    hint=f"{path}.{name}=<figure>, or {path}.embedding_hosts=1",
                )
