"""Sequences on a run's page: the histogram of lengths, and what the events of an example row weigh."""

from made_up_run import result_of
from test_html_report import checked

from pipeline.records import SequenceProfile
from pipeline.report.charts import MOST_EVENTS, sequence_figures
from pipeline.report.html import ReportData, render

PROFILE = {
    "mean": 3.2,
    "p99": 6,
    "longest": 6,
    "empty_share": 0.25,
    "rows_by_length": [25, 50, 15, 10],
    "events_per_bin": 2,
}
EXAMPLE = {
    "row": 1234,
    "target": {"item": "<i9>"},
    "target_weight": 0.5,
    "events": [
        {"names": {"item": "i1", "category": "c&1"}, "age": 7200.0, "weight": -0.25},
        {"names": {"item": "i2", "category": "c2"}, "age": 40.0, "weight": 1.5},
    ],
}


def page_of(sequences, attention):
    part = {"rows": 100, "rows_train": 100, "sequences": sequences}
    return render(ReportData(result=result_of({"ingest": part}), attention=attention))


def test_the_page_has_lengths_and_the_events_of_a_row_with_the_newest_first():
    page = page_of({"seen": PROFILE}, {"seen": EXAMPLE})
    text = " ".join(" ".join(checked(page).text).split())
    for expected in (
        "Events of seen mean 3.2, 99th percentile 6, longest 6",
        "no events: 25.0% of the train rows",
        "1 to 2 events: 50.0% of the train rows",
        "5 to 6 events: 10.0% of the train rows",
        "Attention weights of seen test row 1,234 with item <i9>, newest first",
        "the target itself",
        "i2, c2, 40 seconds before",
        "i1, c&1, 2 hours before",
        "-0.250",
    ):
        assert expected in text, expected
    assert text.index("i2, c2") < text.index("i1, c&1")
    assert "<i9>" not in page.replace("&lt;i9&gt;", "")


def test_a_weight_is_as_wide_as_it_is_large_and_below_zero_has_another_colour():
    (figure,) = sequence_figures({}, {"seen": EXAMPLE})
    svg = str(figure.svg)
    assert 'class="c0" width="1000.0"' in svg and 'class="c3" width="166.7"' in svg and 'width="333.3"' in svg


def test_of_very_many_events_the_newest_are_shown_and_the_others_counted():
    events = [{"names": {"item": f"i{number}"}, "age": None, "weight": 0.1} for number in range(MOST_EVENTS + 3)]
    (figure,) = sequence_figures({}, {"seen": {"row": 0, "target": None, "target_weight": None, "events": events}})
    svg = str(figure.svg)
    assert f">i{MOST_EVENTS + 2}<" in svg and ">i2<" not in svg and "and 3 older events" in svg


def test_a_run_without_sequences_or_of_an_older_release_has_no_section():
    assert "<h2>Sequences</h2>" not in page_of(None, {})
    older = {name: PROFILE[name] for name in ("mean", "p99", "longest", "empty_share")}
    assert sequence_figures({"seen": SequenceProfile.from_json(older)}, {}) == []
