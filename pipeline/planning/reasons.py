"""One sentence for people: why a table gets its sharding, and its tier where that is not the fastest. No torch."""

from __future__ import annotations

from pipeline.config import HardwareConfig
from pipeline.planning.candidates import Offer
from pipeline.planning.choices import DATA_PARALLEL, TABLE_WISE, Choice, Table
from pipeline.planning.hardware import fast_memory, size_text
from pipeline.planning.search import Space
from pipeline.units import GIB


def reason(table: Table, choice: Choice, offer: Offer, space: Space) -> str:
    """Why ``table`` gets ``offer``, out of all its offers in ``space``."""
    return _sharding(table, choice, offer, space) + _tier(space.hardware, table, offer)


def _sharding(table: Table, choice: Choice, offer: Offer, space: Space) -> str:
    if choice.pinned:
        return f"pinned by plan.tables.{table.name}"
    if space.hardware.world_size == 1:
        return "one rank holds every table whole"
    if offer.sharding == DATA_PARALLEL:
        return "so small that reducing the whole table is cheaper than exchanging its lookups"
    if offer.sharding == TABLE_WISE:
        return "fits one rank whole, and whole tables balance the ranks"
    count = len(offer.layout.shards)
    home = {"hbm": "hbm", "ssd": "ssd"}.get(offer.tier, "ddr")
    if table.bytes > space.room.of(home):
        return f"{size_text(table.bytes)} do not fit one rank: split over {count} shards"
    whole = [o for o in space.offers[table.name] if o.sharding == TABLE_WISE and o.tier == offer.tier]
    saved = max(whole[0].ms) / max(*offer.ms, 1e-9) if whole else 0.0
    if saved >= 1.05:
        return f"split over {count} shards: the busiest rank spends {saved:.1f}x less on it than whole"
    return f"split over {count} shards, which evens out memory or work between the ranks"


def _tier(hardware: HardwareConfig, table: Table, offer: Offer) -> str:
    if offer.tier == ("hbm" if hardware.device == "cuda" else "ddr"):
        return ""
    density = f"{table.pooling / (table.bytes / GIB):.3g} lookups a sample and GiB"
    if offer.tier == "ddr":
        return f"; HBM has no room for every table, so this one, with {density}, stays in DDR"
    memory = fast_memory(hardware).upper()
    kept = f"{offer.cache_rows:,} rows in {memory} serve {offer.hit_rate:.1%} of its lookups"
    if offer.tier == "hbm_cached":
        return f"; HBM has no room for every table, so this one stays in DDR behind a cache: {kept}"
    return f"; memory has no room for every table, so this one, with {density}, is on SSD: {kept}"
