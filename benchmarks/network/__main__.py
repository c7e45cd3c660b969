"""``python -m benchmarks.network``: make a bed, measure what its hosts can send one another, and remove it.

``ratio``: bytes/s that a host got out, by the limit asked for.
"""

from __future__ import annotations

from benchmarks.harness import finish, options
from benchmarks.network.bed import Bed, require_bed
from benchmarks.network.ranks import Ranks


def main() -> None:
    """Measure each limit and print the JSON line."""
    limits = ([150.0, 125.0], "limits, a host", {"nargs": "+"})
    given = options(__doc__, hosts=2, mb_per_s=limits, mib=(32, "of each exchange, a rank"))
    require_bed()
    reached = []
    with Bed(given.hosts) as bed, Ranks(bed, 1, "benchmarks.network.rate") as ranks:
        for limit in (None, *(1e6 * mb for mb in given.mb_per_s)):
            bed.limit(limit)
            before = bed.sent()
            found = ranks.ask(mib=given.mib, times=3)
            rate = max(rank["bytes"] / rank["seconds"] for rank in found)
            wire = max(after - start for after, start in zip(bed.sent(), before, strict=True))
            shown = f"limit {limit / 1e6:,.0f} MB/s" if limit else "no limit"
            print(f"{shown}: {rate / 1e6:,.1f} MB/s of payload, {wire / 2**20:,.0f} MiB on the wire", flush=True)
            reached.append(rate)
    unlimited, limited = reached[0], reached[1:]
    shares = [rate / (1e6 * mb) for rate, mb in zip(limited, given.mb_per_s, strict=True)]
    finish("network", min(shares), mb_per_s=given.mb_per_s, shares=shares, unlimited_mb_per_s=unlimited / 1e6)


if __name__ == "__main__":
    main()
