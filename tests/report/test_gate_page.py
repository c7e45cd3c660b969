"""The gate's page, Markdown and lines: what they say, that they are whole without an incumbent, that all is escaped."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.units import for_chat
from pipeline.records import (
    Beside,
    Best,
    Check,
    Curve,
    ErrorBudget,
    Former,
    GateRecord,
    Histogram,
    ModelFigures,
    RowsPower,
    Shift,
    Slice,
)
from pipeline.report.gate import gate_markdown, gate_page
from tests.records.made import figures, gate_record, interval

CHECKS = (
    Check("rows", "gate.min_rows", True, "12,345 rows scored"),
    Check("NE", "gate.max_ne", False, "NE is 0.75 <b>"),
)


def record(incumbent: bool = True, **more) -> GateRecord:
    curve = Curve(predicted=[0.1, 0.5], observed=[0.12, 0.45], rows=[500, 500])
    ours = figures(kind=ModelFigures, calibration_by_prediction=0.0)
    part = Slice(slice="country", value="<de>", rows=400, clicks=100, candidate=figures())
    shares = Histogram(edges=np.linspace(0, 1, 5).tolist(), candidate=[0.4, 0.3, 0.2, 0.1])
    made = {
        "model": "clicks",
        "version": "v00002-ab",
        "rows": 12_345,
        "verdict": "HOLD",
        "candidate": ours,
        "reasons": ("NE is 0.75 <b>", "calibration is off"),
        "reliability": {"candidate": curve},
        "coverage": {"a": 0.8},
        "histogram": shares,
        "checks": CHECKS,
        "slices": (part,),
    }
    if incumbent:
        beside = figures(0.02, 0.0, 0.0)
        made |= {
            "incumbent_version": "v00001-cd",
            "incumbent": ours,
            "change": figures(0.001, 0.001, 0.001),
            "power": RowsPower(limit=0.002, power=0.9, bound=0.01, resolved=0.013, rows_needed=520_000),
            "shift": Shift(psi=0.1, ks=0.05),
            "reliability": {"candidate": curve, "incumbent": curve},
            "former": Former(ne=0.8, calibration=1.0, calibration_by_prediction=0.0, coverage={"a": 0.9}),
            "histogram": replace(shares, incumbent=[0.25] * 4),
            "slices": (replace(part, incumbent=figures(), change=beside),),
        }
    return gate_record(**(made | more))


@pytest.mark.parametrize("incumbent", [True, False])
def test_the_page_is_whole_and_escaped(incumbent: bool) -> None:
    page = gate_page(record(incumbent))
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    ET.fromstring(body)
    assert "&lt;de&gt;" in page and "<de>" not in page and "NE is 0.75 &lt;b&gt;" in page
    assert "Reasons for the hold" in page and 'class="pill HOLD"' in page
    assert ("beside the incumbent v00001-cd" in page) is incumbent
    assert ("Change of NE by slice" in page) is incumbent
    assert page.count("<figure>") == (4 if incumbent else 2)
    for words in ("dashed: the incumbent", ">Incumbent</th>", ">Change</th>", ">Change of NE</th>", "both models"):
        assert (words in page) is incumbent, words
    assert ("| candidate | incumbent |" in gate_markdown(record(incumbent))) is incumbent
    assert ("| NE | incumbent |" in gate_markdown(record(incumbent))) is incumbent


def test_the_page_names_no_label_for_models_may_predict_any() -> None:
    page = gate_page(record(model="churn"))
    assert "click" not in page and ">predicted probability<" in page and "observed rate, 95% intervals" in page


def test_other_models_warnings_and_what_the_rows_can_tell_are_shown() -> None:
    words = "predictions moved <b>; NE is clearly better, so this is only a warning"
    warned = Check("prediction shift", "gate.max_psi", True, words, warned=True)
    best = Best(version="v00001-aa", ne=interval(0.74), change=interval(0.013))
    simple = Beside(ne=interval(0.8), change=interval(-0.06))
    shown = record(best=best, baseline=simple, warnings=(words,), checks=(*CHECKS, warned))
    page, text = gate_page(shown), gate_markdown(shown)
    assert "Warnings" in page and "predictions moved &lt;b&gt;" in page and ">warning</span>" in page
    assert page.index(">failed<") < page.index(">warning<") < page.index(">passed<")
    assert "of NE; the limit is 0.20%, and detecting that takes 520,000 rows" in page and "+1.30%" in page
    for name in ("best of the last versions: v00001-aa", "logistic regression"):
        assert name in page and f"| {name} |" in text
    assert "| warning | prediction shift |" in text and f"- warning: {for_chat(words)}" in text
    ET.fromstring(page[page.index("<main>") : page.index("</main>") + len("</main>")])
    assert "Warnings" not in gate_page(record())


def test_what_failed_comes_first() -> None:
    page, text = gate_page(record()), gate_markdown(record())
    assert page.index(">failed<") < page.index(">passed<")
    assert text.index("**failed**") < text.index("| passed |")


def test_markdown_has_figures_checks_and_slices() -> None:
    text = gate_markdown(record())
    assert text.startswith("# Gate: HOLD\n")
    assert "| NE | 0.7500 [0.7400, 0.7600] | 0.7500 [0.7400, 0.7600] | +0.10% [-0.90%, +1.10%] |" in text
    assert "| country=&lt;de&gt; | 400 |" in text and "<de>" not in text


def test_a_verdict_without_figures_still_has_a_page() -> None:
    bare = gate_record(verdict="HOLD", reasons=("3 of the candidate's predictions are not finite",), rows=5)
    assert "not finite" in gate_page(bare)
    assert "not finite" in gate_markdown(bare)


def test_what_was_overridden_is_not_shown_as_held() -> None:
    page = gate_page(record(verdict="PASS", forced="launch day", reasons=("forced: launch day", "NE is 0.9")))
    assert "Overridden checks" in page and "forced: launch day" in page and "Reasons for the hold" not in page


def test_the_page_of_a_version_that_was_only_judged_says_that_nothing_is_spent() -> None:
    spent = ErrorBudget(
        budget=1.0, spent=0.2, looks=90, day="2026-02-02", alpha=0.002, first_alpha=0.002, look=1, unspent=True
    )
    for text in (gate_page(record(budget=spent)), gate_markdown(record(budget=spent))):
        assert "judged as a first look would judge it, and nothing is spent" in text
        assert "90 looks" not in text


def test_an_id_of_the_log_does_nothing_in_markdown() -> None:
    value = "<img src=x>\x1b[31m@everyone|a\nb](http://evil/)"
    part = Slice(slice="city", value=value, rows=400, clicks=100, candidate=figures())
    named = (f"city={value}", *(f"city={number}" for number in range(20)))
    spent = ErrorBudget(
        budget=1.0, spent=0.2, looks=90, day="2026-02-02", alpha=0.002, first_alpha=0.002, look=1, not_covered=named
    )
    known = record(False, slices=(part,), reasons=(f"NE of city={value} is 0.9", "@here"), budget=spent)
    text = gate_markdown(known)
    assert "90 looks in the year to 2026-02-02 spent 0.2 of gate.budget=1." in text and "city=8 and 11 more" in text
    assert "<img" not in gate_page(known)
    assert [each for each in ("<img", "\x1b", "@everyone", "@here", "](", "\nb") if each in text] == []
    assert "city=&lt;img src=x&gt;" in text


def test_checks_of_slices_that_passed_are_counted_under_checks_and_others_are_shown() -> None:
    slices = [
        Check(f"slice: NE, country={value}", "gate.slice_max_ne_increase", value != "c", value) for value in "abc"
    ]
    page, text = (made(record(checks=(*CHECKS, *slices))) for made in (gate_page, gate_markdown))
    for shown in (page, text):
        assert "2 checks of slices passed" in shown and "slice: NE, country=c" in shown
        assert "slice: NE, country=a" not in shown
    assert "of slices passed" not in gate_page(record())


def test_the_plot_of_slices_has_a_tick_at_each_slice_and_none_beside_them() -> None:
    part = Slice(slice="c", value="x", rows=9, clicks=3, candidate=figures(), incumbent=figures(), change=figures(0.02))
    plot = gate_page(record(slices=(part,) * 3)).partition("Change of NE by slice")[2].partition("</svg>")[0]
    assert [label for label in re.findall(r">([^<>]+)</text>", plot) if label.isdecimal()] == ["1", "2", "3"]
    assert ">0%<" in plot and "+0%" not in plot
