"""Plots: ticks, thinning, intervals, and coordinates inside the picture for any data."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core import units
from pipeline.report.svg import HEIGHT, WIDTH, Axis, ReferenceLine, line_plot, reliability_plot, thin, ticks, wilson

VALUES = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))
X, Y = Axis(title="step", from_zero=True, whole=True), Axis(title="loss")


@given(VALUES, VALUES)
def test_ticks_are_round_and_cover_the_range(one, other):
    low, high = sorted((one, other))
    found = ticks(low, high)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 12
    slack = 1e-6 * step + 1e-9 * max(abs(low), abs(high), 1)
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 1171, [0, 500, 1000, 1500]), (0.41, 0.58, [0.4, 0.45, 0.5, 0.55, 0.6])],
)
def test_ticks_by_example(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_thinning_keeps_spikes_ends_of_range_and_order():
    points = [(float(x), 1000.0 if x == 7777 else float(x % 10)) for x in range(20_000)]
    kept = thin(points, 100)
    assert len(kept) <= 100 and (7777.0, 1000.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert thin(points[:50], 100) == points[:50]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**7), VALUES), min_size=1, max_size=30, unique_by=lambda point: point[0]))
def test_every_coordinate_lies_inside_the_picture(points):
    found = line_plot(
        [(float(x), y) for x, y in sorted(points)], x=X, y=Y, references=[ReferenceLine(0.5, "half")], label="a"
    )
    root = ElementTree.fromstring(found)
    for node in root.iter():
        if "cx" in node.attrib:
            assert -1 <= float(node.get("cx")) <= WIDTH + 1 and -1 <= float(node.get("cy")) <= HEIGHT + 1
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", found):
        assert -1 <= float(x) <= WIDTH + 1 and -1 <= float(y) <= HEIGHT + 1


def test_one_point_is_a_dot_and_no_point_is_nothing():
    assert 'class="dot"' in line_plot([(5.0, 0.4)], x=X, y=Y, label="a")
    assert line_plot([], x=X, y=Y, label="a") == ""
    assert reliability_plot([], [], [], x=X, y=Y, label="a") == ""


def test_close_references_do_not_write_over_each_other():
    found = line_plot(
        [(0.0, 1.0), (9.0, 0.8)], x=X, y=Y, references=[ReferenceLine(0.83, "a"), ReferenceLine(0.832, "b")], label="c"
    )
    rows = [float(y) for y in re.findall(r'class="note" x="[\d.]+" y="([\d.]+)"', found)]
    assert abs(rows[0] - rows[1]) >= 12


def test_text_is_escaped():
    axis = Axis(title="<b>&")
    found = line_plot([(0.0, 1.0), (1.0, 2.0)], x=axis, y=axis, references=[ReferenceLine(1, "<i>")], label='"<')
    texts = [text.strip() for text in ElementTree.fromstring(found).itertext()]
    assert "<b>&" in texts and any("<i>" in text for text in texts)


def test_the_interval_holds_the_rate_and_shrinks_with_rows():
    for rate in (0.0, 0.01, 0.3, 1.0):
        low, high = wilson(rate, 100)
        assert 0 <= low <= rate + 1e-12 and rate - 1e-12 <= high <= 1
        assert wilson(rate, 10_000)[1] - wilson(rate, 10_000)[0] < high - low
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.short(0.25, 0.05), "0.25"),
        (units.short(1000, 500), "1,000"),
        (units.short(80_000, 20_000), "80k"),
        (units.short(1.5e6, 5e5), "1.5M"),
        (units.short(0, 20_000), "0"),
        (units.short(None), "-"),
        (units.short(5e-6, 5e-6), "5e-6"),
        (units.short(0.0, 5e-6), "0"),
        (units.short(2.5e-4, 5e-5), "0.00025"),
        (units.size(0), "0 B"),
        (units.size(930 * 1024), "930 KiB"),
        (units.size(64_280_000), "61.3 MiB"),
        (units.size(None), "-"),
        (units.duration(0.324), "0.32 s"),
        (units.duration(59.96), "1 min 00 s"),
        (units.duration(192), "3 min 12 s"),
        (units.duration(7_500), "2 h 05 min"),
        (units.duration(None), "-"),
        (units.clock(72.4), "00:01:12"),
        (units.clock(90_061), "1d 01:01:01"),
        (units.clock(float("inf")), "-"),
        (units.percent(0.0041), "0.4%"),
        (units.count(81_234.4), "81,234"),
        (units.decimal(float("nan")), "-"),
    ],
)
def test_units(text, expected):
    assert text == expected
