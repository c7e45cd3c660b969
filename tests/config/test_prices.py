"""Files of prices: what is read, and the message for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.prices import HOSTS, ON_DEMAND, SPOT, offer_of, read_prices
from pipeline.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOOD = """\
currency: EUR
hardware:
  laptop: {on_demand: 0.5, spot: 0.2, start_minutes: 6, interrupted_per_hour: 0.1, hosts: [2, 1]}
  big: {file: h100x8, on_demand: 98}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "prices.yaml"
    path.write_text(text)
    return str(path)


def test_offers_are_read_with_their_defaults(tmp_path: Path) -> None:
    prices = read_prices(written(tmp_path, GOOD))
    laptop, big = prices.offers["laptop"], prices.offers["big"]
    assert prices.currency == "EUR" and (laptop.file, laptop.hosts) == ("laptop", (1, 2))
    assert (big.file, big.spot, big.start_minutes, big.hosts) == ("h100x8", None, 0.0, HOSTS)
    # Two hosts for an hour of work and six minutes of start.
    assert laptop.cost(ON_DEMAND, 2, 3600) == pytest.approx(1.1) and laptop.cost(SPOT, 2, 3600) == pytest.approx(0.44)


def test_the_example_is_read_and_its_hardware_is_there() -> None:
    for offer in read_prices(str(ROOT / "examples/prices.yaml")).offers.values():
        assert compose([f"hardware={offer.file}"]).hardware.name == offer.file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("currency: USD", "have no hardware"),
        ("currency: USD\nhardware: {}", "have no hardware"),
        ("hardware: {a: {on_demand: 1}}", "currency in"),
        ("currency: USD\nhardware: {a: 3}", "hardware.a in"),
        ("currency: USD\nhardware: {a: {spot: 3}}", "hardware.a in"),
        ("currency: USD\nhardware: {a: {on_demand: -1}}", "hardware.a.on_demand in"),
        ("currency: USD\nhardware: {a: {on_demand: yes}}", "is True, expected 0 or more"),
        ("currency: USD\nhardware: {a: {on_demand: .inf}}", "is inf, expected 0 or more"),
        (f"currency: USD\nhardware: {{a: {{on_demand: {'9' * 400}}}}}", "expected 0 or more"),
        ("currency: USD\nhardware:\n  a: {on_demand: 1}\n  a: {on_demand: 2}", "has 'a' twice"),
        ("currency: USD\nhardware: {a: {on_demand: 1, on_demand: 2}}", "has 'on_demand' twice"),
        ("currency: USD\nhardware: {a: {on_demand: 1, spots: 2}}", "has 'spots', expected some of: file, on_demand"),
        ("currency: USD\nhardware: {a: {on_demand: 1, hosts: [0]}}", "hardware.a.hosts in"),
        ("currency: USD\nhardware: {a: {on_demand: 1, hosts: 2}}", "is 2, expected numbers from 1 to 4,096"),
        ("currency: USD\nhardware: {a: {on_demand: 1, file: 3}}", "hardware.a.file in"),
        ("currency: USD\nunit: h\nhardware: {a: {on_demand: 1}}", "the file in"),
        ("currency: [", "is not valid YAML"),
    ],
)
def test_a_mistake_names_its_entry_and_the_remedy(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_prices(written(tmp_path, text))
    assert expected in error.value.message and "prices.yaml" in error.value.message and error.value.hint


def test_a_missing_file_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prices(str(tmp_path / "none.yaml"))


def test_settings_of_nights_name_an_offer_that_there_is(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    offer, currency = offer_of(path, "laptop", spot=True, path="nightly")
    assert (offer.name, currency) == ("laptop", "EUR")
    config = compose([f"nightly.prices={path}", "nightly.priced_as=big"])
    assert config.nightly.priced_as == "big"
    for settings, expected in (
        ([f"nightly.prices={path}"], "nightly.priced_as is null, but"),
        ([f"nightly.prices={path}", "nightly.priced_as=small"], "nightly.priced_as is 'small', expected one of"),
        ([f"nightly.prices={path}", "nightly.priced_as=big", "nightly.priced_spot=true"], "has no spot price"),
        (["nightly.priced_as=big"], "nightly.priced_as is set, but nightly.prices is null"),
        (["nightly.priced_spot=true"], "nightly.priced_spot is set, but nightly.prices is null"),
    ):
        with pytest.raises(ConfigError, match=expected):
            compose(settings)
