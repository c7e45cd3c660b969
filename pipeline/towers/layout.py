"""Which ranks hold which towers: sites of hosts, and the peers that exchange with one another (DMT, MLSys'24, 3.1).

A site is a set of hosts that share their towers. Rank j of a site holds all of the site's features for the samples of
its peers, the ranks j of all sites. The paper prints the order of the peers as (g mod T, g div T), which is wrong where
ranks per host and hosts differ; here it is the order of the sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.errors import ConfigError
from pipeline.records import Tower, Towers

_AGAIN = "nightjar partition force=true makes towers.json again"


@dataclass(frozen=True)
class Site:
    """``hosts`` that share the towers of the numbers ``towers``; ``features``: theirs, tower after tower."""

    hosts: tuple[int, ...]
    towers: tuple[int, ...]
    features: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Towers on ``hosts`` of ``ranks_per_host`` ranks each; host h has the ranks from h * ranks_per_host on."""

    towers: Towers
    hosts: int
    ranks_per_host: int

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites in the order of their first hosts."""
        by_hosts: dict[tuple[int, ...], list[int]] = {}
        for number, tower in enumerate(self.towers.towers):
            by_hosts.setdefault(tower.hosts, []).append(number)
        return tuple(
            Site(hosts, tuple(numbers), tuple(f for n in numbers for f in self.towers.towers[n].features))
            for hosts, numbers in sorted(by_hosts.items())
        )

    @property
    def site_size(self) -> int:
        """Ranks of each site."""
        return len(self.sites[0].hosts) * self.ranks_per_host

    @property
    def features(self) -> tuple[str, ...]:
        """All features, site after site: the order in which the peer exchange wants and returns them."""
        return tuple(feature for site in self.sites for feature in site.features)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of what the towers put out, site after site: of its feature where a vector is of one."""
        module, towers = self.towers.module, self.towers.towers
        if module.by_feature:
            return self.features
        numbers = [number for site in self.sites for number in site.towers]
        counts = {number: module.vectors(len(towers[number].features)) for number in numbers}
        return tuple(f"{i} of tower {number}" for number in numbers for i in range(counts[number]))

    def site_ranks(self, site: int) -> list[int]:
        """Global ranks of a site, ascending."""
        local = range(self.ranks_per_host)
        return [host * self.ranks_per_host + rank for host in self.sites[site].hosts for rank in local]

    def site_of(self, rank: int) -> int:
        """The site that a global rank belongs to."""
        host = rank // self.ranks_per_host
        return next(number for number, site in enumerate(self.sites) if host in site.hosts)

    def peers(self, place: int) -> list[int]:
        """Global ranks at ``place`` of every site, in the order of the sites."""
        return [self.site_ranks(site)[place] for site in range(len(self.sites))]


def layout_of(towers: Towers, features: Sequence[str], hosts: int, ranks_per_host: int) -> Layout:
    """The layout of ``towers`` on this hardware; ConfigError, features and hosts named, where it is none."""
    _check_features(towers.towers, features)
    _check_hosts(towers.towers, hosts)
    return Layout(towers, hosts, ranks_per_host)


def _check_features(towers: Sequence[Tower], features: Sequence[str]) -> None:
    home: dict[str, int] = {}
    for number, tower in enumerate(towers):
        if not tower.features:
            raise ConfigError(
                f"tower {number} has no feature, expected at least one in each of {len(towers)} towers",
                hint="a smaller partition.towers, or other partition.pins",
            )
        for feature in tower.features:
            if feature in home:
                raise ConfigError(
                    f"feature {feature!r} is in tower {home[feature]} and in tower {number}, expected one of them",
                    hint=_AGAIN,
                )
            home[feature] = number
    missing = [name for name in features if name not in home]
    unknown = [name for name in home if name not in features]
    if missing or unknown:
        what = f"no tower has: {', '.join(missing)}" if missing else f"not in the dataset: {', '.join(unknown)}"
        raise ConfigError(f"the towers do not hold the dataset's features; {what}", hint=_AGAIN)


def _check_hosts(towers: Sequence[Tower], hosts: int) -> None:
    sites = {tower.hosts for tower in towers}
    placed = sorted(host for site in sites for host in site)
    if placed != list(range(hosts)) or len({len(site) for site in sites}) != 1:
        shown = "; ".join(f"{', '.join(t.features)} on hosts {list(t.hosts)}" for t in towers)
        raise ConfigError(
            f"the towers do not divide the {hosts} hosts among them, expected sets of equally many hosts that are "
            f"equal or have none in common and cover hosts 0 to {hosts - 1}; got {shown}",
            hint=_AGAIN,
        )
