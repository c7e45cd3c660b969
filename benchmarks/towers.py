"""``make bench-towers``: steps over slow links between hosts, flat, with pass-through towers (SPTT) and with DMT.

Hosts are network namespaces with a token bucket each (``benchmarks/network``). One model, the same ids, optimizers and
precision of the exchange (``--exchange fp16``: there, and bf16 back); variants take turns under every limit, all in one
process group. Its MLPs are small, so that communication is at least half of the flat model's step even where all ranks
share two cores: ``flat_comm_share`` is the share of the step that the limit adds to the unlimited one, which leaves out
what copying costs there. ``cpu_ms``: processor time of a step, all ranks together.

``ratio``: step of the faster flat variant / step of ``dmt``, at the limit where it is lower: the ``module`` whose
quality ``benchmarks.towers_quality`` measures, at the same ratio of bytes (``times``). ``dmt_2x``, ``dmt_4x`` and
``dmt_8x``: projections alone. ``inter_bytes``: bytes of embeddings, gradients and ids between hosts for one sample, as
counted; ``wire_bytes``: what the interfaces counted, headers and dense gradients included.

Then a model of the step, whose share of the bandwidth is fitted to the faster flat one at the first limit, is held
against every other step and extrapolated to 64 ranks:

    step = compute + bytes a host sends to other hosts in a step / (its bandwidth x share of it that is used)

``compute`` is the step measured without a limit. Assumed when extrapolated: every rank keeps its batch (weak scaling)
and its compute; tables and features are even over the hosts; no link but a host's own egress is a bottleneck (a core
network that does not block, no incast); nothing is hidden behind compute; latency is free, which favours the flat
model: its collectives have W - 1 partners, towers' one a site; links within a host cost what they cost on the ranks
measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import finish, options, show
from benchmarks.network.bed import Bed, require_bed
from benchmarks.network.ranks import Ranks
from pipeline.records import TowerModuleSpec

# One module, whose speed is measured here and whose quality ``towers_quality`` measures: as many times fewer bytes
# between hosts than flat, ids included, than ``TIMES`` says. Chosen on other seeds than the bench runs.
MODULE, TIMES = TowerModuleSpec(name="dcn_low_rank", rank=32), 3.4
ID_BYTES = LENGTH_BYTES = 4  # int32
FLAT = ("flat_table_wise", "flat_row_wise")
SHAPES = ((4, 16), (8, 8), (16, 4))  # 64 ranks
VALUE_BYTES = {"fp32": 8, "fp16": 4, "bf16": 4, "int8": 3}  # there, and its gradient back


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one variant moves for a sample. ``values``: of all pooled embeddings, ``sent``: of what leaves the towers.

    ``kind``: table_wise | row_wise | towers; ``value_bytes``: of one value there and its gradient back together;
    ``dense_bytes``: of the gradients that all ranks share.
    """

    kind: str
    features: int
    values: int
    sent: int
    value_bytes: int
    dense_bytes: float = 0.0

    def host_bytes(self, batch: int, hosts: int, ranks: int) -> float:
        """Bytes of embeddings, gradients and ids that one of ``hosts`` sends to others in a step; ``batch``: of a rank.

        Towers keep to one host each.
        """
        samples, away = batch * ranks, (hosts - 1) / hosts
        if self.kind == "row_wise":
            # Every rank has partial sums of every sample, and needs every gradient; lengths go to every rank, ids to
            # one.
            copied = self.values * self.value_bytes + self.features * LENGTH_BYTES
            return samples * ((hosts - 1) * ranks * copied + away * self.features * ID_BYTES)
        values = self.values if self.kind == "table_wise" else self.sent
        return samples * away * (self.features * (ID_BYTES + LENGTH_BYTES) + values * self.value_bytes)

    def all_bytes(self, batch: int, hosts: int, ranks: int) -> float:
        """With those of dense gradients that a host sends to the next one, reduced around a ring of all ranks."""
        world = hosts * ranks
        dense = 2 * (world - 1) / world * self.dense_bytes if hosts > 1 else 0.0
        return self.host_bytes(batch, hosts, ranks) + dense


def narrowed(features: int, width: int, towers: int, times: float, value_bytes: int) -> tuple[int, float]:
    """Width of the towers' vectors with which a flat model of ``width`` sends ``times`` as many bytes, and how many.

    One vector a feature; table-wise tables, one rank a host.
    """

    def sent(kind: str, dim: int) -> float:
        counts = {"features": features, "values": features * width, "sent": features * dim}
        return Exchange(kind=kind, value_bytes=value_bytes, **counts).host_bytes(1, towers, 1)

    flat = sent("table_wise", width)
    dim = max((d for d in range(1, width + 1) if times * sent("towers", d) <= flat), default=1)
    return dim, flat / sent("towers", dim)


def main() -> None:
    given = options(
        __doc__,
        hosts=2,
        ranks=(2, "a host"),
        mb_per_s=([150.0, 125.0], "limits (125: 1 Gbit/s)", {"nargs": "+"}),
        tables=32,
        rows=(10_000, "of a table"),
        dim=128,
        batch=(1536, "of a rank"),
        mlp=([64], "hidden widths, below and above", {"nargs": "+"}),
        exchange=("fp32", None, {"choices": tuple(VALUE_BYTES)}),
        rounds=3,
        steps=(3, "of a variant, a round"),
        times=(TIMES, "bytes of flat by those of `dmt`, ids included"),
        module=(MODULE.name, "of `dmt`", {"choices": ["dcn_low_rank", "low_rank"]}),
        rank=(MODULE.rank, "of the module of `dmt`"),
        only=([], "variants; all unless given"),
    )
    require_bed()
    began = time.monotonic()
    variants = {name: spec for name, spec in _variants(given).items() if not given.only or name in given.only}
    with Bed(given.hosts) as bed, Ranks(bed, given.ranks, "benchmarks.towers_ranks") as ranks:
        shape = {name: getattr(given, name) for name in ("hosts", "tables", "rows", "dim", "batch", "mlp", "exchange")}
        ranks.ask(ranks_per_host=given.ranks, variants=variants, **shape)
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
        found = {limit: _measure(given, bed, ranks, list(variants), limit) for limit in (None, *given.mb_per_s)}
    _report(given, variants, found, time.monotonic() - began)


def _variants(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{name: what ``towers_ranks`` makes of it}."""
    dim = narrowed(given.tables, given.dim, given.hosts, given.times, VALUE_BYTES[given.exchange])[0]
    projections = {n: {"module": "dlrm", "c": 1, "p": 0, "dim": given.dim // n} for n in (2, 4, 8)}
    return {
        "flat_table_wise": {"sharding": "table_wise"},
        "flat_row_wise": {"sharding": "row_wise"},
        "sptt": {"module": "pass_through"},
        **{f"dmt_{times}x": spec for times, spec in projections.items()},
        "dmt": {"module": given.module, "rank": given.rank, "cross_layers": MODULE.cross_layers, "dim": dim},
    }


def _measure(
    given: argparse.Namespace, bed: Bed, ranks: Ranks, variants: list[str], limit: float | None
) -> dict[str, dict[str, float]]:
    """{variant: median step ms, and bytes a sample} under a limit in MB/s."""
    bed.limit(None if limit is None else 1e6 * limit)
    steps: dict[str, list[float]] = {name: [] for name in variants}
    figures: dict[str, dict[str, float]] = {}
    if limit is None:  # buffers grow, pipelines fill
        for name in variants:
            ranks.ask(variant=name, steps=3)
    for number in range(given.rounds):
        for name in variants:
            if number and name == "flat_row_wise":
                continue  # sends four times as much: one round shows it
            before = sum(bed.sent())
            answers = ranks.ask(variant=name, steps=given.steps)
            wire = sum(bed.sent()) - before
            steps[name].append(max(answer["step_ms"] for answer in answers))
            intra, inter, _, dense = [sum(parts) for parts in zip(*(a["sent"] for a in answers), strict=True)]
            samples = given.batch * given.ranks * given.hosts * given.steps
            sent = {"intra": intra, "inter": inter, "dense": dense, "wire": wire}
            figures[name] = {what: count / samples for what, count in sent.items()}
            figures[name]["cpu_ms"] = sum(answer["cpu_ms"] for answer in answers)
    for name in variants:
        figures[name]["ms"] = statistics.median(steps[name])
    shown = f"{limit:g} MB/s" if limit else "no limit"
    show(f"{shown}, ms", {name: figures[name]["ms"] for name in variants}, ".0f")
    return figures


def _exchange_of(given: argparse.Namespace, spec: dict[str, Any], dense_per_sample: float) -> Exchange:
    """The model's view of a variant; ``dense_per_sample``: bytes of dense gradients between hosts, as counted."""
    vectors = spec["p"] * given.hosts if spec.get("p") else given.tables
    world = given.hosts * given.ranks
    return Exchange(
        kind=spec.get("sharding") or "towers",
        features=given.tables,
        values=given.tables * given.dim,
        sent=vectors * spec.get("dim", given.dim),
        value_bytes=VALUE_BYTES[given.exchange],
        # All hosts together send hosts * 2 (W - 1) / W of the dense bytes.
        dense_bytes=dense_per_sample * given.batch * world / (given.hosts * 2 * (world - 1) / world),
    )


def _report(
    given: argparse.Namespace, variants: dict[str, dict[str, Any]], found: dict[float | None, Any], seconds: float
) -> None:
    limits, free, shape = given.mb_per_s, found[None], (given.batch, given.hosts, given.ranks)
    exchanges = {name: _exchange_of(given, spec, free[name]["dense"]) for name, spec in variants.items()}
    sent = {name: exchange.all_bytes(*shape) for name, exchange in exchanges.items()}
    flat = {limit: min((n for n in FLAT if n in variants), key=lambda n: found[limit][n]["ms"]) for limit in limits}
    first, best = limits[0], flat[limits[0]]
    # The share of a host's bandwidth that reaches the payload, so that the model meets one measured step.
    used = 1000 * sent[best] / (1e6 * first * max(found[first][best]["ms"] - free[best]["ms"], 1e-9))

    def step_ms(name: str, sent_bytes: float, mb_per_s: float) -> float:
        return free[name]["ms"] + 1000 * sent_bytes / (1e6 * mb_per_s * used)

    errors = []
    for name in variants:
        shown = {"ms without limit": free[name]["ms"], **{k: free[name][k] for k in ("inter", "dense", "wire")}}
        for limit in limits:
            predicted, ms = step_ms(name, sent[name], limit), found[limit][name]["ms"]
            shown |= {f"ms at {limit:g} MB/s": ms, "by the model": predicted}
            if (limit, name) != (first, best):
                errors.append(abs(predicted / ms - 1))
        show(name, shown, ",.0f")
    for limit in limits:
        for per_rank in (True, False):  # a rank's bandwidth as measured, and a host's
            for hosts, ranks in SHAPES:
                rate = limit * (ranks / given.ranks if per_rank else 1)
                steps = {n: step_ms(n, e.all_bytes(given.batch, hosts, ranks), rate) for n, e in exchanges.items()}
                show(f"model: {hosts} x {ranks} ranks, {rate:g} MB/s a host, ms", steps, ",.0f")
    ratios = {limit: found[limit][flat[limit]]["ms"] / found[limit]["dmt"]["ms"] for limit in limits}
    comm = {limit: 1 - free[flat[limit]]["ms"] / found[limit][flat[limit]]["ms"] for limit in limits}
    samples = given.batch * given.ranks
    finish(
        "towers",
        min(ratios.values()),
        seconds=seconds,
        mb_per_s=limits,
        times=given.times,
        module=replace(MODULE, name=given.module, rank=given.rank).label,
        ratios={f"{limit:g}": round(value, 3) for limit, value in ratios.items()},
        flat_comm_share={f"{limit:g}": round(value, 3) for limit, value in comm.items()},
        step_ms={name: [round(found[limit][name]["ms"], 1) for limit in (None, *limits)] for name in variants},
        cpu_ms={name: round(free[name]["cpu_ms"], 1) for name in variants},
        inter_bytes={name: round(free[name]["inter"], 1) for name in variants},
        wire_bytes={name: round(free[name]["wire"], 1) for name in variants},
        model_bytes={name: round(each.host_bytes(*shape) / samples, 1) for name, each in exchanges.items()},
        bandwidth_used=used,
        model_median_error=statistics.median(errors),
        model_largest_error=max(errors),
    )


if __name__ == "__main__":
    main()
