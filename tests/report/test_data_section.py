"""The dataset on a run's page and in its table: what was quarantined and why, what moved since the day before."""

from made_up_run import make_result, result_of
from test_html_report import checked

from pipeline.report import summary
from pipeline.report.html import ReportData, render
from pipeline.report.run_tables import PROFILE, QUALITY

PART = {
    "rows": 1000,
    "rows_train": 760,
    "rows_test": 200,
    "rows_quarantined": 40,
    "bytes_in": 4096,
    "rows_per_s": 1.0,
    "reasons": {"x is not a finite number": 30, "the <label> is missing": 10},
    "day": "2026-01-02",
    "rows_late": {"2026-01-01": 3},
    "rows_freed": {"user": 2},
    "replaces": "datasets/d/2026-01-02/" + "0" * 32,
    "warnings": [f"feature 'f{i}': its values moved, PSI {i}" for i in range(7)],
}
DATA = {
    QUALITY: {
        "quarantine": {"rows": 40, "reasons": PART["reasons"]},
        "checks": {
            "warnings": PART["warnings"][:1],
            "against": "datasets/d/2026-01-01/k",
            "drift": {"label": {"label_rate": 0.1}, "user": {"psi": 0.4}, "price": {"psi": 0.01}},
        },
        "distribution": {"features": {"user": {"distinct": 1234}, "price": {"distinct": 99}}},
    },
    PROFILE: {
        "dense": {"price": {"missing_share": 0.25, "mean": 7.5}},
        "sparse": {"user": {"missing_share": 0.0, "rows": 5000}, "new": {"missing_share": 1.0, "rows": 2}},
    },
    "bytes": 2048,
}


def test_the_section_tells_rows_reasons_and_what_moved_most_first():
    page = render(ReportData(result=result_of({"ingest": PART}), data=DATA))
    text = " ".join(checked(page).text)
    for expected in (
        "760 train and 200 test rows, 2.0 KiB written; day 2026-01-02; replaces datasets/d/2026-01-02/000",
        "3 rows kept for 2026-01-01; 2 rows of user freed; compared with datasets/d/2026-01-01/k.",
        "x is not a finite number 30 75.0%",
        "the <label> is missing 10 25.0%",
        "'f0': its values moved",
        "user sparse 0.0% - 1,234 5,000 0.400",
        "price dense 25.0% 7.5 - - 0.010",
    ):
        assert expected in text.replace("–", "-"), expected
    assert page.index(">user<") < page.index(">price<") < page.index(">new<")
    for part, data in (({}, DATA), (PART, {})):
        assert "<h2>Data</h2>" not in render(ReportData(result=result_of({"ingest": part}), data=data))


def test_the_table_tells_reasons_what_is_replaced_and_the_first_warnings():
    text = summary(result_of({**make_result(), "ingest": PART}))
    for expected in (
        "1,000 rows, 40 of them in quarantine",
        "quarantined: x is not a finite number (30), the <label> is missing",
        "replaces datasets/d/2026-01-02/0000",
        "warning: feature 'f4': its values moved, PSI 4",
        "and 2 more warnings",
    ):
        assert expected in text
    assert "PSI 5" not in text and max(len(line) for line in text.splitlines()) <= 80
