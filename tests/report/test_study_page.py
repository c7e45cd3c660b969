"""A study's page and text, from made-up trials."""

from pipeline.plugins.tuning.study_page import front, studies_listing, study_page, study_text
from pipeline.records.study import BROKEN, PRUNED, StudyLine
from tests.plugins.tuning.studies import shown, trial

TRIALS = [
    trial(0, 0.52, step_ms=2.0, table_bytes=2**21, test_ne=0.53, test_auc=0.9),
    trial(1, 0.50, step_ms=4.0, table_bytes=2**22, parameters={"train.lr": 0.01, "model.embedding_dim": "<8>"}),
    trial(2, state=PRUNED, samples=(10,)),
    trial(3, state=BROKEN, error="NE is <not> finite"),
    trial(4, 0.51, step_ms=5.0, table_bytes=2**20),
]


def test_the_page_has_trials_importance_fronts_and_escapes_what_comes_from_outside() -> None:
    page = study_page(shown(TRIALS))
    assert "<8>" not in page and "&lt;8&gt;" in page and "NE is &lt;not&gt; finite" in page
    assert "3 trials, 2 of them on the Pareto front" in page  # of the step's time
    assert "0.50000" in page and "90.0%" in page and "numbers from 0.0001 to 0.1, by their logarithm" in page
    assert "75.0% saved" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_study_that_has_just_begun_has_a_page() -> None:
    page = study_page(shown([]))
    assert "Study s" in page and '<svg class="plot"' not in page


def test_the_text_has_the_best_trial_first_and_says_what_decides() -> None:
    lines = study_text(shown(TRIALS)).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["1", "4", "0", "2", "3"]
    assert "importance: train.lr 90%" in lines
    assert lines[-1] == "best: trial 1, train.lr=0.01 model.embedding_dim=<8>"


def test_the_front_has_what_nothing_else_is_below() -> None:
    assert front([(2, 5), (1, 6), (3, 5), (2, 7), (4, 1), (1, 6)]) == [(1, 6), (2, 5), (4, 1)]
    assert front([]) == []


def test_the_listing_counts_trials_by_state() -> None:
    line = StudyLine(study="s", created=0.0, trials={"done": 3, "pruned": 2}, best=1, ne=0.5)
    assert studies_listing([line]).splitlines()[1].split() == (
        ["s", "1970-01-01", "00:00", "5", "3", "2", "0", "0", "1", "0.50000"]
    )
    assert studies_listing([]) == "no studies"
