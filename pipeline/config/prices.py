"""Prices of machines: a YAML file of the user's, read and checked. Nightjar ships none.

currency: USD
hardware:
  h100x8:                       # your name of the offer
    file: h100x8                # its hardware file: the same name unless it says another one
    on_demand: 98.0             # of a host, an hour
    spot: 39.0
    start_minutes: 6            # from the order to a host that works
    interrupted_per_hour: 0.05  # of a spot host
    hosts: [1, 2, 4]            # how many may be ordered
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError

HOSTS = (1, 2, 4, 8)
MOST_HOSTS = 4096
HOUR_SECONDS = 3600.0
ON_DEMAND, SPOT = "on_demand", "spot"
_NUMBERS = (ON_DEMAND, SPOT, "start_minutes", "interrupted_per_hour")
_KEYS = ("file", *_NUMBERS, "hosts")


@dataclass(frozen=True, kw_only=True)
class HostPrice:
    """What a host of an offer costs an hour; ``spot`` None: it is not offered.

    ``file``: the option of group ``hardware`` that describes it. ``start_minutes``: paid before it works.
    ``interrupted_per_hour``: how often a spot host is taken away. ``hosts``: numbers of hosts that may be ordered.
    """

    name: str
    file: str
    on_demand: float
    spot: float | None = None
    start_minutes: float = 0.0
    interrupted_per_hour: float = 0.0
    hosts: tuple[int, ...] = HOSTS

    def cost(self, kind: str, hosts: int, seconds: float) -> float:
        """Return the price of ``hosts`` for ``seconds`` of work and their start.

        Args:
            kind: on_demand | spot.
        """
        rate = self.on_demand if kind == ON_DEMAND else self.spot
        assert rate is not None
        return rate * hosts * (seconds / HOUR_SECONDS + self.start_minutes / 60)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The offers of a file by name, and their ``currency``."""

    currency: str
    offers: dict[str, HostPrice]


def read_prices(path: str) -> Prices:
    """Read the prices in the file at ``path``.

    Raises:
        ConfigError: There is no such file, or an entry is not as it has to be; the message names it.
    """
    import yaml

    try:
        text = Path(path).read_text()
        # Parse twice, because only the tree keeps both of two equal keys.
        content, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(
            f"prices {path} cannot be read: {error.strerror}", hint="name a file as docs/price.md describes"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{path} is not valid YAML: {str(error).splitlines()[0]}", hint="correct the file, as in docs/price.md"
        ) from None
    # If a key occurs twice, YAML silently takes the later value.
    if (twice := _repeated_key(tree)) is not None:
        raise ConfigError(f"{path} has {twice!r} twice in one mapping", hint="give each offer a name of its own")
    if not isinstance(content, Mapping) or not isinstance(content.get("hardware"), Mapping) or not content["hardware"]:
        raise ConfigError(
            f"prices {path} have no hardware, expected currency and a mapping of offers",
            hint="hardware: {laptop: {on_demand: 0.1}}, as in docs/price.md",
        )
    currency = content.get("currency")
    if not isinstance(currency, str) or not currency.strip():
        raise ConfigError(f"currency in {path} is {currency!r}, expected a text", hint="currency: USD")
    _refuse_unknown(content, ("currency", "hardware"), path, "the file")
    offers = {str(name): _read_offer(str(name), entry, path) for name, entry in content["hardware"].items()}
    return Prices(currency=currency.strip(), offers=offers)


def offer_of(prices: str, name: str | None, *, spot: bool, path: str) -> tuple[HostPrice, str]:
    """Return the offer that settings name, and its currency.

    Args:
        prices: Path of the file of prices.
        name: The offer's name; None: the only one.
        spot: Whether it needs a spot price.
        path: The path of the settings' group, for messages.

    Raises:
        ConfigError: The file has no such offer, or the offer no spot price.
    """
    known = read_prices(prices)
    names = list(known.offers)
    if name is None and len(names) > 1:
        raise ConfigError(
            f"{path}.priced_as is null, but {prices} has {len(names)} offers: {', '.join(names)}",
            hint=f"{path}.priced_as={names[0]}",
        )
    if name is None:
        name = names[0]
    if name not in known.offers:
        near = difflib.get_close_matches(name, names, 1, 0.5) or names
        raise ConfigError(
            f"{path}.priced_as is {name!r}, expected one of {prices}: {', '.join(names)}",
            hint=f"{path}.priced_as={near[0]}",
        )
    offer = known.offers[name]
    if spot and offer.spot is None:
        raise ConfigError(
            f"{path}.priced_spot is true, but hardware.{name} in {prices} has no spot price",
            hint=f"{path}.priced_spot=false, or spot: 0.5 in the file",
        )
    return offer, known.currency


def _read_offer(name: str, entry: Any, path: str) -> HostPrice:
    where = f"hardware.{name} in {path}"
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{where} is {entry!r}, expected settings such as on_demand", hint=f"{name}: {{on_demand: 1.0}}"
        )
    _refuse_unknown(entry, _KEYS, path, f"hardware.{name}")
    if ON_DEMAND not in entry:
        raise ConfigError(f"{where} has no on_demand, the price of a host an hour", hint="on_demand: 1.0")
    numbers = {}
    for key in _NUMBERS:
        value = entry.get(key)
        if value is None and key != ON_DEMAND:
            continue
        # A value that is not a number stays NaN, which fails the comparison below.
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            # A whole number of some hundred digits does not fit into a float.
            with suppress(OverflowError):
                number = float(value)
        if not 0 <= number < math.inf:
            raise ConfigError(
                f"hardware.{name}.{key} in {path} is {value!r:.40}, expected 0 or more", hint=f"{key}: 1.0"
            )
        numbers[key] = number
    file = entry.get("file", name)
    if not isinstance(file, str) or not file:
        raise ConfigError(
            f"hardware.{name}.file in {path} is {file!r}, expected the name of a hardware file", hint="file: laptop"
        )
    hosts = entry.get("hosts", list(HOSTS))
    valid = isinstance(hosts, list) and bool(hosts)
    for count in hosts if valid else ():
        # YAML's yes is True, which Python treats as the number 1.
        valid = valid and isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MOST_HOSTS
    if not valid:
        raise ConfigError(
            f"hardware.{name}.hosts in {path} is {hosts!r}, expected numbers from 1 to {MOST_HOSTS:,}",
            hint="hosts: [1, 2, 4]",
        )
    return HostPrice(name=name, file=file, hosts=tuple(sorted(set(hosts))), **numbers)


def _repeated_key(tree: Any) -> str | None:
    # Search YAML's node tree, in which a sequence's value is a list of nodes and a mapping's value a list of pairs.
    known = set()
    if not isinstance(getattr(tree, "value", None), list):
        return None
    for entry in tree.value:
        if isinstance(entry, tuple):
            key, value = entry
            if isinstance(key.value, str) and key.value in known:
                return str(key.value)
            known.add(str(key.value))
            entry = value
        found = _repeated_key(entry)
        if found is not None:
            return found
    return None


def _refuse_unknown(entry: Mapping[Any, Any], known: tuple[str, ...], path: str, where: str) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"{near[0]}: <value>" if near else f"leave {key} out"
            raise ConfigError(f"{where} in {path} has {key!r}, expected some of: {', '.join(known)}", hint=hint)
