"""The bed of network namespaces: hosts reach one another, send no faster than told, and leave nothing behind."""

import subprocess

import pytest

from benchmarks.network import Bed, BedError, Ranks, unavailable

pytestmark = pytest.mark.net


@pytest.fixture(scope="module", autouse=True)
def _permitted():
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")


def namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_ranks_of_two_hosts_exchange_at_no_more_than_the_limit_and_all_is_removed():
    before = namespaces()
    limit = 20e6
    with Bed(hosts=2) as bed:
        assert namespaces() - before == {*bed.hosts, bed.hosts[0].removesuffix("0") + "switch"}
        with Ranks(bed, 1, "benchmarks.network") as ranks:
            bed.limit(limit)
            start = bed.sent()
            found = ranks.ask(mib=4, times=2)
            sent = [after - first for after, first in zip(bed.sent(), start, strict=True)]
    assert all(rank["right"] for rank in found)
    for rank, wire in zip(found, sent, strict=True):
        # One exchange more than is timed crossed the wire, and a bucket lets through no more than rate and burst.
        assert 1.5 * rank["bytes"] < wire < 1.8 * rank["bytes"]
        assert rank["seconds"] > 0.9 * rank["bytes"] / limit
    assert namespaces() == before


def test_a_rank_that_dies_is_named_and_the_bed_is_removed():
    before = namespaces()
    with (
        pytest.raises(RuntimeError, match="rank 0 ended with exit code 1"),
        Bed(hosts=1) as bed,
        Ranks(bed, 1, "benchmarks.no_such_module") as ranks,
    ):
        ranks.ask(anything=1)
    assert namespaces() == before


def test_what_tc_refuses_is_said_in_its_words():
    with Bed(hosts=1) as bed, pytest.raises(BedError, match="tc -n .* tbf"):
        bed.limit(0.0)
