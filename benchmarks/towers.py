"""``make bench-towers``: steps over slow links between hosts, flat, with pass-through towers (SPTT) and with DMT.

Hosts are network namespaces with a token bucket each (``benchmarks/network``). One model, the same ids, optimizers and
precision of the exchange (``--exchange fp16``: there, and bf16 back); variants take turns under every limit, all in one
process group. Its MLPs are small, so that communication is at least half of the flat model's step even where all ranks
share two cores: ``flat_comm_share`` is the share of the step that the limit adds to the unlimited one, which leaves out
what copying costs there. ``cpu_ms``: processor time of a step, all ranks together.

``ratio``: step of the faster flat variant / step of ``dmt``, at the limit where it is lower: the ``module`` whose
quality ``benchmarks.towers_quality`` measures, at the same ratio of bytes (``times``). ``dmt_2x``, ``dmt_4x`` and
``dmt_8x``: projections alone. ``inter_bytes``: bytes of embeddings, gradients and ids between hosts for one sample, as
counted; ``wire_bytes``: what the interfaces counted, headers and dense gradients included. Then
``benchmarks.towers_model``, fitted to the faster flat one at the first limit, is held against every other step and
extrapolated to 64 ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.common import finish
from benchmarks.network.bed import Bed, stop_on_sigterm, unavailable
from benchmarks.network.ranks import Ranks
from benchmarks.towers_model import (
    MODULE,
    TIMES,
    Exchange,
    StepModel,
    dense_host_bytes,
    fitted,
    host_bytes,
    narrowed,
    predictions,
)

FLAT = ("flat_table_wise", "flat_row_wise")
SHAPES = ((4, 16), (8, 8), (16, 4))  # 64 ranks
VALUE_BYTES = {"fp32": 8, "fp16": 4, "bf16": 4, "int8": 3}  # there, and its gradient back


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--ranks", type=int, default=2, help="a host")
    options.add_argument("--mb-per-s", type=float, nargs="+", default=[150.0, 125.0], help="limits (125: 1 Gbit/s)")
    options.add_argument("--tables", type=int, default=32)
    options.add_argument("--rows", type=int, default=10_000, help="of a table")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--batch", type=int, default=1536, help="of a rank")
    options.add_argument("--mlp", type=int, nargs="+", default=[64], help="hidden widths, below and above")
    options.add_argument("--exchange", choices=tuple(VALUE_BYTES), default="fp32")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=3, help="of a variant, a round")
    options.add_argument("--times", type=float, default=TIMES, help="bytes of flat by those of `dmt`, ids included")
    options.add_argument("--rank", type=int, default=MODULE.rank, help="of the module of `dmt`")
    options.add_argument("--only", nargs="*", help="variants; all unless given")
    given = options.parse_args()
    stop_on_sigterm()
    reason = unavailable()
    if reason is not None:
        sys.exit(f"no network namespaces here: {reason}")
    began = time.monotonic()
    variants = {name: spec for name, spec in _variants(given).items() if not given.only or name in given.only}
    with Bed(given.hosts) as bed, Ranks(bed, given.ranks, "benchmarks.towers_ranks") as ranks:
        ranks.ask(
            hosts=given.hosts,
            ranks_per_host=given.ranks,
            tables=given.tables,
            rows=given.rows,
            dim=given.dim,
            batch=given.batch,
            mlp=given.mlp,
            exchange=given.exchange,
            variants=variants,
        )
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
        found = {limit: _measure(given, bed, ranks, list(variants), limit) for limit in (None, *given.mb_per_s)}
    _report(given, variants, found, time.monotonic() - began)


def _variants(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{name: what ``towers_ranks`` makes of it}."""
    dim = given.dim
    return {
        "flat_table_wise": {"sharding": "table_wise"},
        "flat_row_wise": {"sharding": "row_wise"},
        "sptt": {"module": "pass_through"},
        "dmt_2x": {"module": "dlrm", "c": 1, "p": 0, "dim": dim // 2},
        "dmt_4x": {"module": "dlrm", "c": 1, "p": 0, "dim": dim // 4},
        "dmt_8x": {"module": "dlrm", "c": 1, "p": 0, "dim": dim // 8},
        "dmt": {
            "module": MODULE.name,
            "rank": given.rank,
            "cross_layers": MODULE.cross_layers,
            "dim": narrowed(given.tables, dim, given.hosts, given.times, VALUE_BYTES[given.exchange])[0],
        },
    }


def _measure(
    given: argparse.Namespace, bed: Bed, ranks: Ranks, variants: list[str], limit: float | None
) -> dict[str, dict[str, float]]:
    """{variant: median step ms, and bytes a sample} under a limit in MB/s."""
    bed.limit(None if limit is None else 1e6 * limit)
    samples = given.batch * given.ranks * given.hosts
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
            each = samples * given.steps
            figures[name] = {
                "intra": intra / each,
                "inter": inter / each,
                "dense": dense / each,
                "wire": wire / each,
                "cpu_ms": sum(answer["cpu_ms"] for answer in answers),
            }
    for name in variants:
        figures[name]["ms"] = statistics.median(steps[name])
    shown = f"{limit:g} MB/s" if limit else "no limit"
    print(f"{shown}: " + ", ".join(f"{name} {figures[name]['ms']:.0f} ms" for name in variants), flush=True)
    return figures


def exchange_of(given: argparse.Namespace, name: str, spec: dict[str, Any], dense_per_sample: float) -> Exchange:
    """The model's view of a variant; ``dense_per_sample``: bytes of dense gradients between hosts, as counted."""
    kind, vectors = spec.get("sharding") or "towers", given.tables
    if spec.get("p"):
        vectors = spec["p"] * given.hosts
    world = given.hosts * given.ranks
    # All hosts together send hosts * 2 (W - 1) / W of the dense bytes.
    dense = dense_per_sample * given.batch * world / (given.hosts * 2 * (world - 1) / world)
    return Exchange(
        kind=kind,
        features=given.tables,
        values=given.tables * given.dim,
        sent=vectors * spec.get("dim", given.dim),
        value_bytes=VALUE_BYTES[given.exchange],
        dense_bytes=dense,
    )


def _report(
    given: argparse.Namespace, variants: dict[str, dict[str, Any]], found: dict[float | None, Any], seconds: float
) -> None:
    limits = [limit for limit in found if limit is not None]
    free = found[None]
    exchanges = {name: exchange_of(given, name, spec, free[name]["dense"]) for name, spec in variants.items()}
    sent = {
        name: host_bytes(exchange, given.batch, given.hosts, given.ranks)
        + dense_host_bytes(exchange, given.hosts, given.ranks)
        for name, exchange in exchanges.items()
    }
    flat = {limit: min((n for n in FLAT if n in variants), key=lambda n: found[limit][n]["ms"]) for limit in limits}
    first = limits[0]
    best = flat[first]
    model = fitted(free[best]["ms"], found[first][best]["ms"], sent[best], 1e6 * first)
    errors = _table(found, sent, model, flat)
    for limit in limits:
        _extrapolate(given, model, exchanges, {name: free[name]["ms"] for name in variants}, limit)
    ratios = {limit: found[limit][flat[limit]]["ms"] / found[limit]["dmt"]["ms"] for limit in limits}
    samples = given.batch * given.ranks
    finish(
        "towers",
        min(ratios.values()),
        seconds=seconds,
        mb_per_s=limits,
        times=given.times,
        module=replace(MODULE, rank=given.rank).label,
        ratios={f"{limit:g}": round(value, 3) for limit, value in ratios.items()},
        flat_comm_share={
            f"{limit:g}": round(1 - free[flat[limit]]["ms"] / found[limit][flat[limit]]["ms"], 3) for limit in limits
        },
        step_ms={name: [round(found[limit][name]["ms"], 1) for limit in (None, *limits)] for name in variants},
        cpu_ms={name: round(free[name]["cpu_ms"], 1) for name in variants},
        inter_bytes={name: round(free[name]["inter"], 1) for name in variants},
        wire_bytes={name: round(free[name]["wire"], 1) for name in variants},
        model_bytes={
            name: round(host_bytes(exchanges[name], given.batch, given.hosts, given.ranks) / samples, 1)
            for name in variants
        },
        bandwidth_used=model.used,
        model_median_error=statistics.median(errors),
        model_largest_error=max(errors),
    )


def _table(
    found: dict[float | None, Any], sent: dict[str, float], model: StepModel, flat: dict[float, str]
) -> list[float]:
    """Print what was measured; the model's relative errors, but for the step it was fitted to."""
    limits = [limit for limit in found if limit is not None]
    head = f"\n{'':<17}{'between hosts, bytes a sample':>44}{'step ms':>10}"
    print(head + "".join(f"{f'{limit:g} MB/s':>11}{'model':>8}{'ratio':>7}" for limit in limits))
    print(f"{'':<17}{'exchange':>11}{'dense':>11}{'on the wire':>22}{'no limit':>10}")
    errors = []
    for name, free in found[None].items():
        line = f"{name:<17}{free['inter']:>11,.0f}{free['dense']:>11,.0f}{free['wire']:>22,.0f}{free['ms']:>10.0f}"
        for limit in limits:
            ms = found[limit][name]["ms"]
            told = model.step_ms(free["ms"], sent[name], 1e6 * limit)
            line += f"{ms:>11.0f}{told:>8.0f}{found[limit][flat[limit]]['ms'] / ms:>7.2f}"
            if (limit, name) != (limits[0], flat[limits[0]]):
                errors.append(abs(told / ms - 1))
        print(line, flush=True)
    return errors


def _extrapolate(
    given: argparse.Namespace,
    model: StepModel,
    exchanges: dict[str, Exchange],
    compute_ms: dict[str, float],
    limit: float,
) -> None:
    """Print 64 ranks as the model sees them: a rank's bandwidth as measured, and a host's."""
    for what in ("rank", "host"):
        print(f"\n64 ranks, {limit / given.ranks if what == 'rank' else limit:g} MB/s a {what} (model)")
        for hosts, ranks in SHAPES:
            rate = 1e6 * limit * (ranks / given.ranks if what == "rank" else 1)
            told = predictions(model, exchanges, compute_ms, given.batch, [(hosts, ranks)], rate)[hosts, ranks]
            best = min(ms for name, ms in told.items() if name in FLAT)
            shown = "  ".join(f"{name} {ms:,.0f} ms ({best / ms:.2f}x)" for name, ms in told.items())
            print(f"  {hosts:>2} x {ranks:<2} {shown}", flush=True)


if __name__ == "__main__":
    main()
