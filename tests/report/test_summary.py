"""The summary table: its figures, its width, and any part may be missing."""

import itertools

import pytest
from made_up_run import fill, make_record, make_result, result_of

from pipeline.records import Evaluation
from pipeline.report import Reporter, compare, summary
from pipeline.report.summary import reachable_gain

PARTS = ("stages", "ingest", "plan", "train", "checkpoint", "eval")


@pytest.mark.parametrize(("ne", "warned"), [(0.83214, False), (1.0, False), (1.0185, True), (None, False)])
def test_a_model_worse_than_the_click_rate_is_named_beside_its_ne(ne, warned):
    result = make_result()
    result["eval"]["ne"] = ne
    text = " ".join(summary(result_of(result), "store/runs/demo", []).split())
    assert ("NE above 1 is worse than predicting the click rate for every row" in text) is warned


def test_the_table_shows_every_part():
    text = summary(result_of(make_result()), "store/runs/demo", ["report.html", "result.json"])
    for expected in (
        "run demo: done in 1 min 16 s",
        "train       done          61.3  runs/demo/train/",
        "400,000 rows, 12 of them in quarantine",
        "26 tables: 9 data_parallel in ddr",
        "DDR 40.0 MiB; step 1.234 ms (predicted)",
        "4,800,000 samples in 1,172 steps, 58.9 s on 2 ranks",
        "81,494 samples/s, 0.4% of the time waiting for data",
        "step 50.25 ms (48.10 predicted)",
        "of it input exchange 2.50 ms (2.00), lookup 5.00 ms (4.00), dense",
        "memory for training 700 MiB on the fullest rank (600 MiB predicted)",
        "3 written, 80.0 MiB of 120 MiB for full ones, training stalled 0.2%",
        "NE 0.83214   AUC 0.78123   log loss 0.46712   calibration 1.0031",
        "best reachable NE 0.80210: 84.8% of the reachable gain",
        "look at     store/runs/demo/",
        "report.html  result.json",
    ):
        assert expected in text


def test_gauc_is_shown_with_its_groups():
    record = make_result()
    grouped = {**record["eval"], "group_by": "user", "gauc": 0.61234, "gauc_groups": 1204, "gauc_rows": 9000}
    with_interval = {**grouped, "gauc_interval": [0.6, 0.625]}
    for scores, line in (
        (grouped, "GAUC 0.61234 within 1,204 groups by user"),
        (with_interval, "GAUC 0.61234 (95% interval 0.60000 to 0.62500) within 1,204 groups by user"),
        (
            {**record["eval"], "group_by": "user", "gauc_groups": 0, "gauc_rows": 0},
            "GAUC is not defined: no group by user has test rows of both classes",
        ),
    ):
        assert line in " ".join(summary(result_of({**record, "eval": scores})).split())
    assert "GAUC" not in summary(result_of(record))


def test_after_a_resume_the_session_is_told_apart_from_the_whole_training():
    record = make_result()
    text = summary(
        result_of({**record, "train": {**record["train"], "resumed": {"step": 1_171, "samples": 4_796_000}}})
    )
    assert "4,800,000 samples in 1,172 steps in all, resumed after step 1,171" in text
    assert "this session: 4,000 samples in 1 step, 58.9 s on 2 ranks" in text


def test_skipped_and_failed_checkpoints_are_told():
    result = make_result()
    result["checkpoint"] |= {"skipped": 2, "failed": 1}
    text = summary(result_of(result))
    assert "2 skipped, for the one before was still being written" in text
    assert "1 failed, their rows went into the next" in text


@pytest.mark.parametrize("present", itertools.chain.from_iterable(itertools.combinations(PARTS, n) for n in range(7)))
def test_any_part_may_be_absent_and_no_line_is_wider_than_80(present):
    result = {"run": "demo", "status": "done", **{part: make_result()[part] for part in present}}
    text = summary(result_of(result))
    assert max(map(len, text.splitlines())) <= 80
    assert ("samples/s" in text) == ("train" in present)
    assert ("NE 0.83214" in text) == ("eval" in present)


@pytest.mark.parametrize("part", PARTS[1:])
def test_any_figure_may_be_absent(part):
    assert summary(result_of(make_result(**{part: {"unknown": 1}})))


def test_skipped_and_failed_stages_and_the_error_are_shown():
    stages = {
        "ingest": {"status": "skipped", "seconds": 0.0, "artifact": "datasets/a/k"},
        "train": {"status": "failed", "seconds": 3.21, "artifact": None},
    }
    error = {"message": "loss is not finite at step 12: the first bad value is in table C7 " * 3, "exit_code": 5}
    error["hint"] = "train.lr=0.0005"
    text = summary(result_of({"run": "r", "status": "failed", "stages": stages, "error": error}))
    assert "ingest      skipped          -  datasets/a/k" in text
    assert "train       failed         3.2  -" in text
    assert "\nhint        train.lr=0.0005" in text
    assert "(exit code 5)" in text and "error       loss is not finite" in text
    assert max(map(len, text.splitlines())) <= 80


def test_long_paths_and_names_stay_within_80_columns():
    stages = {"train": {"status": "done", "seconds": 1e5, "artifact": f"runs/{'n' * 90}/train/{'a' * 32}"}}
    assert max(map(len, summary(result_of({"run": "r", "status": "done", "stages": stages})).splitlines())) <= 80


def test_gate_and_model_are_shown_when_they_ran():
    gate = {"verdict": "HOLD", "reasons": ["NE rose"]}
    text = summary(result_of(make_result(gate=gate, model={"version": "7", "uri": "m/7"})))
    assert text.startswith("run demo: done in")
    held = summary(result_of(make_result(status="failed", gate=gate)))
    assert held.startswith("run demo: held by the gate after 1 min 16 s\n")
    assert summary(result_of(make_result(status="failed"))).startswith("run demo: failed after 1 min 16 s\n")
    assert "gate        HOLD\n            NE rose" in text and "model       version 7 at m/7" in text


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"ne": 0.9, "bayes_ne": 0.8}, 0.5),
        ({"ne": 0.9}, None),
        ({"bayes_ne": 0.8}, None),
        ({"ne": 1.1, "bayes_ne": 1.0}, None),
    ],
)
def test_the_reachable_gain(figures, expected):
    assert reachable_gain(Evaluation(**figures)) == (None if expected is None else pytest.approx(expected))


def test_the_reporter_writes_the_summary_and_names_files_that_exist(store, capsys):
    text = Reporter(store, "demo").summary(result_of(fill(store, records=[make_record(20)])))
    assert capsys.readouterr().out == f"\n{text}\n"
    assert text.endswith("result.json  metrics.jsonl  config.yaml") and "report.html" not in text


def test_runs_are_compared_in_80_columns_and_the_best_ne_is_marked():
    runs = [
        make_result(run=f"sweep-{index}", eval={**make_result()["eval"], "ne": ne})
        for index, ne in enumerate((0.9, 0.8))
    ]
    failed = {"run": "a-very-long-name-of-a-run-in-a-sweep", "status": "failed"}
    lines = compare([result_of(run) for run in (*runs, failed)]).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 5
    assert "0.90000 " in lines[2] and "0.80000*" in lines[3] and "0.90000*" not in lines[2]
    assert "failed" in lines[4] and ".. " in lines[4]


def test_comparing_shows_what_is_special_about_each_run():
    lines = compare([result_of(make_result())] * 2, ["train.lr=0.01", "train.lr=0.02"]).splitlines()
    assert lines[2].endswith("train.lr=0.01") and lines[3].endswith("train.lr=0.02")
    with pytest.raises(ValueError, match="1 notes for 2 results"):
        compare([result_of(make_result())] * 2, ["one"])


def test_no_runs_to_compare():
    assert compare([]) == "no runs to compare"


def test_without_predictions_the_measured_figures_stand_alone():
    train = {
        "step": {"measured_ms": 5.0},
        "phases": {"dense": {"measured_ms": 5.0}},
        "memory": {"measured_bytes": 1024},
    }
    text = summary(result_of(make_result(train=train)))
    assert "step 5.00 ms\n            of it dense 5.00 ms\n" in text
    assert "memory for training 1.0 KiB on the fullest rank\n" in text
