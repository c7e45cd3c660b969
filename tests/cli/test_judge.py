"""``nightjar judge``: the gate's verdict on scores of any framework, files of all formats, and what it refuses."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import api, cli
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, DataError
from pipeline.evaluation import ScoredRows, SliceColumn, judge, measure
from pipeline.records import GateRecord
from tests.commands import kill_nightjar
from tests.conftest import ROOT

ROWS = 12_000


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def logistic_regression(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Weights and bias, by Newton's method."""
    inputs = np.column_stack([features, np.ones(len(features))])
    weights = np.zeros(inputs.shape[1])
    for _ in range(8):
        predicted = sigmoid(inputs @ weights)
        hessian = (inputs * (predicted * (1 - predicted))[:, None]).T @ inputs
        weights += np.linalg.solve(hessian, inputs.T @ (labels - predicted))
    return weights


@pytest.fixture(scope="module")
def scores() -> pl.DataFrame:
    """Test rows with the probabilities of two regressions, of which one lacks a feature; users, countries, times."""
    rng = np.random.default_rng(7)
    features = rng.normal(size=(2 * ROWS, 3))
    truth = features @ [1.0, 0.8, 0.3] - 1.2
    labels = (rng.random(2 * ROWS) < sigmoid(truth)).astype(np.int64)
    predicted = {}
    for name, used in (("new", [0, 1, 2]), ("old", [0, 1])):
        weights = logistic_regression(features[:ROWS, used], labels[:ROWS])
        predicted[name] = sigmoid(features[ROWS:][:, used] @ weights[:-1] + weights[-1])
    return pl.DataFrame(
        {
            "label": labels[ROWS:],
            "id": [f"r{number}" for number in range(ROWS)],
            "day": np.arange(ROWS) // 4000,
            "country": rng.choice(["de", "fr", None], ROWS).tolist(),
            "user": rng.integers(0, 600, ROWS),
            "weight": rng.choice([0.5, 1.0, 3.0], ROWS),
            "time": np.arange(ROWS) * 10,
            **predicted,
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory, scores: pl.DataFrame) -> Path:
    """A folder with the scores of each model in a file of its own, and both in one."""
    folder: Path = tmp_path_factory.mktemp("files")
    scores.write_parquet(folder / "both.parquet")
    for name in ("new", "old"):
        scores.drop("new", "old").with_columns(scores[name].alias("score")).write_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def plain(files: Path) -> GateRecord:
    """What the command says of ``new.parquet`` beside ``old.parquet``."""
    out = io.StringIO()
    with contextlib.chdir(files), contextlib.redirect_stdout(out):
        assert cli.main(["judge", "new.parquet", "old.parquet", "--json"]) == 0
    return GateRecord.from_json(json.loads(out.getvalue()))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path) -> Path:
    """A copy of ``files``, in which the test works."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def record_of(done) -> GateRecord:
    return GateRecord.from_json(json.loads(done.stdout))


def without_names(record: GateRecord) -> GateRecord:
    return dataclasses.replace(record, model="", version="", incumbent_version=None)


def test_a_better_model_passes_and_the_worse_one_is_held(work: Path, nightjar) -> None:
    done = nightjar("judge", "new.parquet", "old.parquet")
    assert done.returncode == 0 and done.stdout.split()[:2] == ["gate", "PASS"], done.stdout + done.stderr
    assert "new.parquet on 12,000 test rows, beside the incumbent old.parquet" in done.stdout
    done = nightjar("judge", "old.parquet", "new.parquet")
    assert done.returncode == 6 and done.stdout.split()[:2] == ["gate", "HOLD"]
    assert "a rise with at least 90% confidence" in " ".join(done.stdout.split())


def test_one_file_with_two_columns_is_two_files(work: Path, nightjar, plain: GateRecord) -> None:
    one = record_of(nightjar("judge", "both.parquet", "--score", "new", "--incumbent-score", "old", "--json"))
    assert without_names(one) == without_names(plain) and one.change is not None
    assert (one.model, one.incumbent_version) == ("new", "old")


def test_the_verdict_is_the_gates_on_the_same_logits(work: Path, nightjar, scores: pl.DataFrame) -> None:
    """To the last bit: slices, weights and users included."""
    logits = {name: np.log(scores[name] / (1 - scores[name])).to_numpy().astype(np.float32) for name in ("new", "old")}
    scores.with_columns(**{name: pl.Series(values) for name, values in logits.items()}).write_parquet("logits.parquet")
    command = ["judge", "logits.parquet", "--logits", "--score", "new", "--incumbent-score", "old", "--json"]
    command += ["--slice", "day", "--weight", "weight", "--user", "user", "gate.slice_min_clicks=50", "seed=5"]
    found = record_of(nightjar(*command))

    settings = compose(["gate.slice_min_clicks=50"]).gate
    numbers = {user: number for number, user in enumerate(scores["user"].unique(maintain_order=True))}
    scored = ScoredRows(
        labels=scores["label"].to_numpy().astype(np.float32),
        candidate=logits["new"],
        incumbent=logits["old"],
        slices={"day": SliceColumn(codes=scores["day"].to_numpy())},
        weights=scores["weight"].to_numpy(),
        users=np.array([numbers[user] for user in scores["user"]]),
    )
    measured = measure(scored, settings, 5)
    measured = dataclasses.replace(measured, weights_not_finite=None)
    expected = judge(measured, settings, scored)
    assert len(expected.slices) == 3 and expected.gauc.users > 100
    assert without_names(found) == GateRecord.from_json(json.loads(json.dumps(expected.to_json())))


def test_all_formats_and_keys_in_any_order_give_the_same_record(work: Path, nightjar, scores: pl.DataFrame) -> None:
    plain = record_of(nightjar("judge", "new.parquet", "old.parquet", "--slice", "country", "--json"))
    assert {part.value for part in plain.slices} == {"de", "fr", "(missing)"}
    other = pl.read_parquet("old.parquet").select("id", "day", "label", pl.col("score").alias("p"))
    shuffled = other.sample(fraction=1, shuffle=True, seed=3)
    shuffled.write_csv("old.csv")
    shuffled.write_ipc("old.arrow")
    shuffled.write_ipc_stream("old.feather")
    with fsspec.open("memory://judge/old.parquet", "wb") as sink:
        shuffled.write_parquet(sink)
    with fsspec.open("memory://judge/old.csv.gz", "wb", compression="gzip") as sink:
        sink.write(shuffled.write_csv().encode())
    with fsspec.open("memory://judge/old.arrow", "wb") as sink:
        shuffled.write_ipc(sink)
    for name in ("old.csv", "old.arrow", "old.feather"):
        for url in (name, f"memory://judge/{name}"):
            if name == "old.feather" and url != name:
                continue
            url = url.replace("memory://judge/old.csv", "memory://judge/old.csv.gz")
            command = ["judge", "new.parquet", "--key", "id", url, "--key", "day", "--slice", "country", "--json"]
            done = nightjar(*command, "--incumbent-score", "p")
            assert done.returncode == 0, done.stderr
            assert without_names(record_of(done)) == without_names(plain), url
    assert fsspec.filesystem("memory").exists("judge/old.parquet")
    done = nightjar("judge", "new.parquet", "memory://judge/old.parquet", "--key", "id", "--incumbent-score", "p")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("root", ["", "memory://parts/"])
def test_files_of_a_folder_or_a_glob_are_read_by_name(work: Path, nightjar, plain: GateRecord, root: str) -> None:
    """As Spark and Ray leave them, with a mark beside them."""
    rows = pl.read_parquet("old.parquet")
    Path("old").mkdir()
    for number in (2, 0, 1):
        with fsspec.open(f"{root}old/part-{number}.parquet", "wb") as sink:
            rows.slice(4000 * number, 4000).write_parquet(sink)
    with fsspec.open(f"{root}old/_SUCCESS", "wb"):
        pass
    for url in (f"{root}old", f"{root}old/part-*.parquet"):
        done = nightjar("judge", "new.parquet", url, "--json")
        assert done.returncode == 0, done.stderr
        assert without_names(record_of(done)) == without_names(plain)


def test_keys_match_across_ways_to_store_them(work: Path, nightjar, plain: GateRecord) -> None:
    """Text and categories, integers of other widths."""
    kinds = ((pl.Categorical, pl.UInt8), (pl.String, pl.Int64))
    for name, (text, integer) in zip(("new", "old"), kinds, strict=True):
        frame = pl.read_parquet(f"{name}.parquet")
        frame.with_columns(pl.col("id").cast(text), pl.col("day").cast(integer)).write_parquet(f"{name}.parquet")
    found = record_of(nightjar("judge", "new.parquet", "old.parquet", "--key", "id", "--key", "day", "--json"))
    assert found == plain


def test_a_column_of_the_key_may_be_the_user_and_a_slice_too(work: Path, nightjar) -> None:
    command = ["judge", "new.parquet", "old.parquet", "--user", "user", "--slice", "day", "--json"]
    key = ["--key", "id", "--key", "user", "--key", "day", "--key", "id"]
    assert record_of(nightjar(*command, *key)) == record_of(nightjar(*command))


def test_users_and_slices_that_are_nan_are_missing(work: Path, nightjar) -> None:
    rows = pl.read_parquet("both.parquet")
    known = pl.int_range(pl.len()) % 3 > 0
    for missing, name in ((None, "null"), (float("nan"), "nan")):
        number = pl.col("user").cast(pl.Float64)
        user = pl.when(known).then(number).otherwise(pl.lit(missing, pl.Float64))
        country = pl.when(known).then(number % 2).otherwise(pl.lit(missing, pl.Float64))
        rows.with_columns(user=user, country=country).write_parquet(f"{name}.parquet")
    columns = ["--score", "new", "--incumbent-score", "old", "--user", "user", "--slice", "country", "--json"]
    found = record_of(nightjar("judge", "nan.parquet", *columns))
    assert found == record_of(nightjar("judge", "null.parquet", *columns))
    assert {part.value for part in found.slices} == {"(missing)", "0.0", "1.0"}


@pytest.mark.parametrize("kind", [pl.Int128, pl.UInt128, pl.Time, pl.Duration("ns"), pl.Datetime("ns")])
def test_users_and_slices_may_be_of_types_that_python_or_arrow_lack(work: Path, kind: pl.DataType) -> None:
    rows = pl.read_parquet("both.parquet")
    odd = rows.with_columns(pl.col("user", "day").cast(pl.Int64).cast(kind))
    known = {"score": "new", "incumbent_score": "old", "user": "user", "slices": ["day"]}
    expected, found = api.judge(rows, **known), api.judge(odd, **known)
    assert (found.change, found.verdict) == (expected.change, expected.verdict)
    assert [part.rows for part in found.slices or ()] == [part.rows for part in expected.slices or ()]


def test_keys_of_all_integers_match_and_what_polars_does_not_know_is_told(work: Path) -> None:
    new = pl.read_parquet("new.parquet").with_row_index("key")
    old = pl.read_parquet("old.parquet").with_row_index("key")
    expected = api.judge(new, old).change
    for kind in (pl.Int64, pl.Int128, pl.UInt128):
        assert api.judge(new, old.with_columns(pl.col("key").cast(kind)), key=["key"]).change == expected
    far = pl.col("key").cast(pl.UInt128) + pl.lit(2**100).cast(pl.UInt128) * 2**27
    assert api.judge(new.with_columns(far), old.with_columns(far), key=["key"]).change == expected
    objects = pl.Series("key", [object() for _ in range(old.height)], dtype=pl.Object)
    with pytest.raises(DataError, match="key key is Object, expected a value"):
        api.judge(new.with_columns(objects), old.with_columns(objects), key=["key"])
    ends = pa.RunEndEncodedArray.from_arrays(pa.array([old.height], pa.int32()), pa.array([1]))
    with pytest.raises(DataError, match="the candidate's frame cannot be read as a frame of Polars"):
        api.judge(new.to_arrow().append_column("x", ends))


def test_rows_are_sorted_by_time(work: Path, nightjar, plain: GateRecord) -> None:
    """Blocks of the bootstrap are rows that follow each other; CSV has times as text."""
    rows = pl.read_parquet("both.parquet").sample(fraction=1, shuffle=True, seed=1)
    moments = pl.from_epoch(rows["time"], time_unit="s")
    rows.with_columns(moments.dt.to_string("%Y-%m-%d %H:%M:%S").alias("time")).write_csv("shuffled.csv")
    columns = ["--score", "new", "--incumbent-score", "old", "--json"]
    found = record_of(nightjar("judge", "shuffled.csv", "--time", "time", *columns))
    assert without_names(found) == without_names(plain)
    assert without_names(record_of(nightjar("judge", "shuffled.csv", *columns))).change != plain.change


def test_a_first_model_is_judged_by_its_limits_alone(work: Path, nightjar) -> None:
    found = record_of(nightjar("judge", "new.parquet", "--json"))
    assert found.verdict == "PASS" and found.incumbent is None and found.baseline is None
    names = [check.name for check in found.checks]
    assert names == ["finite predictions", "rows", "NE", "AUC", "calibration"]
    assert nightjar("judge", "new.parquet", "gate.min_auc=0.99").returncode == 6


def test_settings_of_the_gate_are_overrides(work: Path, nightjar) -> None:
    command = ["judge", "old.parquet", "new.parquet"]
    assert nightjar(*command, "gate.max_ne_increase=null").returncode == 0
    assert nightjar(*command, "gate.max_ne_increase=0.5").returncode == 0
    assert nightjar(*command, "gate.force=the feature was removed on purpose").returncode == 0


BUDGET = ("judge", "new.parquet", "old.parquet", "gate.budget=1", "--ledger", "deep/ledger.json")


def alphas_of(ledger: str = "deep/ledger.json") -> list[float]:
    """Of the looks in the ledger, in days' shares."""
    return [look["alpha"] * 365 for look in json.loads(Path(ledger).read_text())["looks"]]


def test_a_budget_is_spent_look_by_look(work: Path, nightjar) -> None:
    for day in ("2026-02-02", "2026-02-02", "2026-02-09"):
        done = nightjar(*BUDGET, "--day", day, "--json", "--page", "page.html", "--markdown", "verdict.md")
        assert done.returncode == 0, done.stderr
    record = record_of(done)
    assert alphas_of() == pytest.approx([0.8, 0.16, 0.8 * 7])
    assert (record.budget.look, record.budget.looks) == (1, 3)
    assert record.budget.spent == pytest.approx(6.56 / 365)
    words = "3 looks in the year to 2026-02-09 spent 0.018 of gate.budget=1"
    assert words in Path("page.html").read_text() and words in Path("verdict.md").read_text()
    looks = json.loads(Path("deep/ledger.json").read_text())["looks"]
    assert {(look["candidate"], look["verdict"]) for look in looks} == {("new.parquet", "PASS")}
    done = nightjar("judge", "new.parquet", "gate.budget=1", "--ledger", "deep/ledger.json")
    assert done.returncode == 0 and len(alphas_of()) == 3, "a first model is compared with nothing"
    done = nightjar("judge", "old.parquet", "new.parquet", *BUDGET[3:], "--day", "2026-02-09")
    assert done.returncode == 6 and "4 looks in the year to 2026-02-09" in " ".join(done.stdout.split())
    assert json.loads(Path("deep/ledger.json").read_text())["looks"][3]["verdict"] == "HOLD"


def test_the_python_call_spends_from_the_same_ledger(work: Path) -> None:
    for url in ("ledger.json", "memory://budget/ledger.json"):
        for number in (1, 2):
            given = {"ledger": url, "day": date(2026, 2, 2)}
            assert api.judge("new.parquet", "old.parquet", "gate.budget=2", **given).budget.look == number
    assert alphas_of("ledger.json") == pytest.approx([1.6, 0.32])


def test_days_and_ledgers_of_python_are_those_of_the_command(work: Path) -> None:
    days = [datetime(2026, 2, 2, 13, 30), "2026-02-02", date(2026, 2, 2)]
    for number, day in enumerate(days, 1):
        record = api.judge("new.parquet", "old.parquet", "gate.budget=1", ledger=Path("l.json"), day=day)
        assert (record.budget.look, record.budget.day) == (number, "2026-02-02")
    for given, words in (({"day": 20260202}, "20260202 is not a day"), ({"ledger": 3}, "3 is not the name of a file")):
        with pytest.raises(ConfigError, match=words):
            api.judge("new.parquet", "old.parquet", "gate.budget=1", **{"ledger": "l.json", **given})
    assert len(alphas_of("l.json")) == 3


def test_whoever_is_killed_before_the_verdict_has_looked(work: Path, nightjar) -> None:
    command = [*BUDGET, "--day", "2026-02-02"]
    kill_nightjar(command, cwd=work, where="pipeline.evaluation.gate.budget:judge", count=1)
    (look,) = json.loads(Path("deep/ledger.json").read_text())["looks"]
    assert "verdict" not in look
    assert nightjar(*command).returncode == 0
    assert alphas_of() == pytest.approx([0.8, 0.16])


# Words of a command beside the two files; exit code, and what is said.
WRONG_BUDGETS = {
    "no ledger": (("gate.budget=1",), 2, "gate.budget is 1, but no ledger is given", "--ledger ledger.json"),
    "no budget": (("--ledger", "x.json"), 2, "ledger x.json is given, but gate.budget is null", "gate.budget=1"),
    "a day alone": (
        ("--day", "2026-02-02"),
        2,
        "day 2026-02-02 is given, but gate.budget is null",
        "leave out --day",
    ),
    "no day": (("--day", "20260202"), 2, "'20260202' is not a day; expected YYYY-MM-DD", ""),
    "a folder": (("gate.budget=1", "--ledger", "folder/"), 2, "ledger folder/ is a folder", "folder/ledger.json"),
    "a folder's name": (
        ("gate.budget=1", "--ledger", "folder"),
        2,
        "ledger folder is a folder",
        "folder/ledger.json",
    ),
    "no file of looks": (
        ("gate.budget=1", "--ledger", "new.parquet"),
        7,
        "is not a ledger of gate.budget",
        "restore it",
    ),
    "a damaged ledger": (("gate.budget=1", "--ledger", "bad.json"), 7, "looks is missing", "restore it from a copy"),
    "no bucket": (
        ("gate.budget=1", "--ledger", "s3://ledger.json"),
        2,
        "ledger s3://ledger.json has no bucket or folder",
        "--ledger s3://bucket/ledger.json",
    ),
    "no folder in memory": (("gate.budget=1", "--ledger", "memory://l.json"), 2, "no bucket or folder", "--ledger"),
    "below a file": (("gate.budget=1", "--ledger", "bad.json/l.json"), 2, "cannot be a file: Not a directory", "--led"),
    "a device": (("gate.budget=1", "--ledger", "/dev/null"), 2, "ledger /dev/null is a device", "--ledger ledger.json"),
    "no name": (("gate.budget=1", "--ledger", ""), 2, "ledger '' is empty", "--ledger ledger.json"),
    "a day to come": (
        ("gate.budget=1", "--ledger", "x.json", "--day", "2206-02-07"),
        2,
        "day 2206-02-07 is in the future",
        "or an earlier day",
    ),
    "before all logs": (
        ("gate.budget=1", "--ledger", "x.json", "--day", "0001-01-01"),
        2,
        "day 0001-01-01 is before 1970",
        "or an earlier day",
    ),
    "too much": (("gate.budget=1000", "--ledger", "x.json"), 2, "gate.budget is 1000", "gate.budget=100"),
}


@pytest.mark.parametrize("case", WRONG_BUDGETS)
def test_a_budget_that_cannot_be_spent_is_an_error(work: Path, nightjar, case: str) -> None:
    words, code, *said = WRONG_BUDGETS[case]
    Path("folder").mkdir()
    Path("bad.json").write_text("{}")
    done = nightjar("judge", "new.parquet", "old.parquet", *words)
    assert done.returncode == code, done.stdout + done.stderr
    for text in said:
        assert text in done.stderr
    assert "Traceback" not in done.stderr and Path("bad.json").read_text() == "{}"
    assert not Path("x.json").exists() and not Path("s3:").exists() and not Path("memory:").exists()


def test_a_page_that_cannot_be_written_does_not_cost_the_verdict(work: Path, nightjar) -> None:
    Path("folder").mkdir()
    done = nightjar(*BUDGET, "--day", "2026-02-02", "--json", "--page", "folder")
    assert done.returncode == 2 and "--page folder is a folder" in done.stderr
    assert record_of(done).verdict == "PASS" and len(alphas_of()) == 1


@pytest.mark.parametrize(
    ("page", "code", "said"),
    [
        ("", 2, "--page is empty, expected the name of a file"),
        ("nothing://x", 2, "--page nothing://x cannot be opened: Protocol not known: nothing"),
        ("http://127.0.0.1:9/x.html", 2, "can only be read, expected a file to write"),
        ("new.parquet/x.html", 7, "the file system refuses writing new.parquet/x.html"),
    ],
)
def test_a_page_that_no_file_can_be_is_one_message(work: Path, nightjar, page: str, code: int, said: str) -> None:
    done = nightjar("judge", "new.parquet", "old.parquet", "--page", page)
    assert (done.returncode, "PASS" in done.stdout) == (code, True)
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_new_ledger_and_a_further_look_are_said(work: Path, nightjar) -> None:
    said = []
    for day in ("2026-02-02", "2026-02-01"):
        done = nightjar(*BUDGET, "--day", day)
        said.append(" ".join((done.stdout + done.stderr).split()))
    assert "deep/ledger.json begins with this look: no earlier ones are known" in said[0]
    assert "counts as look" not in said[0]
    assert "judged on rows of 2026-02-01, counts as look 2 at 2026-02-02" in said[1] and "alpha 0.00044" in said[1]
    assert "begins with this look" not in said[1]


def test_a_clear_drop_of_gauc_is_held(work: Path, nightjar) -> None:
    command = ["judge", "old.parquet", "new.parquet", "gate.max_ne_increase=null", "--user", "user"]
    done = nightjar(*command)
    assert done.returncode == 6 and "beyond -0.002 (gate.max_gauc_drop)" in " ".join(done.stdout.split())
    for wider in (("--max-gauc-drop", "0.2"), ("gate.max_gauc_drop=0.2",), ("gate.max_gauc_drop=null",)):
        assert nightjar(*command, *wider).returncode == 0
    assert nightjar(*command, "gate.max_gauc_drop=0.2", "--max-gauc-drop", "0.001").returncode == 6, "the option counts"


def test_page_and_markdown_are_written_for_both_verdicts(work: Path, nightjar) -> None:
    for verdict, files in (("PASS", ("new.parquet", "old.parquet")), ("HOLD", ("old.parquet", "new.parquet"))):
        nightjar("judge", *files, "--page", "out/page.html", "--markdown", "verdict.md", "--slice", "country")
        page, text = Path("out/page.html").read_text(), Path("verdict.md").read_text()
        assert f"Gate: {verdict} {files[0]}" in page and "country=de" in page
        assert "gate.json" not in page, "there is none beside it"
        assert text.startswith(f"# Gate: {verdict}\n\n{files[0]} on 12,000 test rows, beside the incumbent {files[1]}")


def test_the_python_call_returns_the_record_of_the_command(work: Path, nightjar) -> None:
    options = ["--slice", "country", "--user", "user"]
    expected = record_of(nightjar("judge", "new.parquet", "old.parquet", "gate.blocks=500", *options, "--json"))
    record = api.judge("new.parquet", "old.parquet", "gate.blocks=500", slices=["country"], user="user")
    assert record.to_json() == expected.to_json() and record.verdict == "PASS"
    assert record.weights_not_finite is None and "finite weights" not in {check.name for check in record.checks}
    # A frame of Arrow, which hands on the same streams as one of pandas.
    frames = api.judge(pl.read_parquet("new.parquet"), pq.read_table("old.parquet"), "gate.blocks=500")
    assert (frames.model, frames.incumbent_version) == ("candidate", "incumbent")
    assert frames.change == expected.change
    paths = api.judge(Path("new.parquet"), Path("old.parquet"), "gate.blocks=500")
    assert (paths.model, paths.change) == ("new.parquet", expected.change)
    for given in ({"score": [0.5]}, pl.scan_parquet("new.parquet")):
        with pytest.raises(ConfigError, match=f"is a .* {type(given).__name__}, expected its name, or a frame"):
            api.judge(given)
    with pytest.raises(ConfigError, match="gate.max_nee is unknown"):
        api.judge("new.parquet", None, "gate.max_nee=1")
    with pytest.raises(DataError, match="does not exist"):
        api.judge("none.parquet")


def set_rows(column: str, values: dict) -> object:
    """A change of a frame: some rows of ``column`` get other values."""

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        changed = frame[column].to_list()
        for row, value in values.items():
            changed[row] = value
        return frame.with_columns(pl.Series(column, changed, strict=False))

    return change


def beside(frame: pl.DataFrame, scores: pl.Expr) -> pl.DataFrame:
    """The candidate's rows with the scores of an incumbent."""
    return frame.with_columns(other=scores)


KEYED = ("old.parquet", "--key", "id")
BESIDE = ("--incumbent-score", "other")
# What is wrong: how the candidate's file differs, further words of the command, exit code, and what is said.
WRONG = {
    "outside of [0, 1]": (
        set_rows("score", {3: 1.5, 4: -2.0}),
        (),
        3,
        ("2 of 12,000 of the candidate's scores lie outside of [0, 1], the first is 1.5", "--logits"),
    ),
    "labels of three values": (
        set_rows("label", {5: 2}),
        (),
        3,
        ("1 of 12,000 labels (column label) are neither 0 nor 1, the first is 2", "--label"),
    ),
    "missing labels": (
        set_rows("label", {5: None, 6: None}),
        (),
        3,
        ("2 of 12,000 labels (column label) are missing",),
    ),
    "labels of text": (lambda frame: frame.with_columns(label=pl.lit("yes")), (), 3, ("are String, expected numbers",)),
    "one class": (
        lambda frame: frame.filter(pl.col("label") == 0),
        (),
        3,
        ("have label 0 (column label), expected both classes", "rows of both classes"),
    ),
    "fewer rows": (
        lambda frame: frame.head(9000),
        ("old.parquet",),
        3,
        ("the candidate's file has 9,000 rows and the incumbent's 12,000", "--key"),
    ),
    "other rows": (
        lambda frame: frame.sample(fraction=1, shuffle=True, seed=2),
        ("old.parquet",),
        3,
        ("rows have another label in the incumbent's file", "--key"),
    ),
    "a key twice": (set_rows("id", {1: "r0"}), KEYED, 3, ("2 of 12,000 rows of the candidate's file have a key id",)),
    "a key missing": (set_rows("id", {1: None}), KEYED, 3, ("1 of 12,000 rows", "have no value of key id")),
    "a key alone": (
        set_rows("id", {1: "x"}),
        KEYED,
        3,
        ("1 of 12,000 rows of the candidate's file have a key id that the other lacks, and 1 of 12,000", "both models"),
    ),
    "a key of another type": (
        lambda frame: frame.with_columns(id=pl.int_range(pl.len())),
        KEYED,
        3,
        ("key id is Int64 in the candidate's file, String in the incumbent's",),
    ),
    "another label of a key": (
        lambda frame: frame.with_columns(label=1 - pl.col("label")),
        KEYED,
        3,
        ("12,000 of 12,000 rows have another label",),
    ),
    "a key twice in one file": (
        lambda frame: pl.concat([beside(frame, pl.col("score") ** 2)] * 2),
        (*BESIDE, "--key", "id"),
        3,
        ("24,000 of 24,000 rows of the candidate's file have a key id that another row has, too",),
    ),
    "an incumbent without labels": (
        lambda frame: frame,
        ("bare.parquet",),
        3,
        ("the incumbent's file has no labels (column label), and no key names a row", "--key <column>, of both files"),
    ),
    "an incumbent's scores in another order": (
        lambda frame: beside(frame, pl.col("score").shuffle(seed=1)),
        BESIDE,
        3,
        ("the scores of candidate and incumbent have a correlation of ", "over 12,000 rows", "--key"),
    ),
    "an incumbent's scores of the other class": (
        lambda frame: beside(frame, 1 - pl.col("score")),
        BESIDE,
        3,
        ("have a correlation of -1.000 over 12,000 rows", "predict_proba(rows)[:, 1]"),
    ),
    "an incumbent's scores that are one": (
        lambda frame: beside(frame, pl.lit(0.25)),
        BESIDE,
        3,
        ("all 12,000 of the incumbent's scores are one number", "--incumbent-score"),
    ),
    "scores that are one": (
        lambda frame: frame.with_columns(score=pl.lit(frame["label"].mean())),
        (),
        3,
        ("all 12,000 of the candidate's scores are one number", "--score"),
    ),
    "scores that are the labels": (
        lambda frame: frame.with_columns(score=pl.col("label").cast(pl.Float32)),
        (),
        3,
        ("all 12,000 of the candidate's scores are the labels, expected what a model predicts", "--score"),
    ),
    "the column of the labels": (
        lambda frame: frame,
        ("--score", "label"),
        2,
        ("--score label is the column of the labels", "--score <column of scores>"),
    ),
    "logits that are probabilities": (
        lambda frame: frame,
        ("--logits",),
        3,
        ("all 12,000 of the candidate's scores lie in [0, 1], as those of probabilities do", "leave out --logits"),
    ),
    "no rows": (lambda frame: frame.clear(), (), 3, ("has no rows",)),
    "a negative weight": (
        set_rows("weight", {1: -1.0}),
        ("--weight", "weight"),
        3,
        ("1 of 12,000 weights (column weight) are missing, negative or not finite",),
    ),
    "weights of nothing": (
        lambda frame: frame.with_columns(weight=pl.lit(0.0)),
        ("--weight", "weight"),
        3,
        ("all 12,000 weights (column weight) are 0",),
    ),
    "weights of few rows": (
        lambda frame: frame.with_columns(weight=pl.when(pl.int_range(pl.len()) < 8).then(1e200).otherwise(1.0)),
        ("--weight", "weight"),
        3,
        ("the 12,000 weights (column weight) count as 8.0 rows", "expected 30 at least"),
    ),
    "a time of text": (lambda frame: frame, ("--time", "country"), 3, ("column country is String, expected times",)),
    "a time missing": (set_rows("time", {0: None}), ("--time", "time"), 3, ("1 of 12,000 rows have no time",)),
    "a slice of lists": (
        lambda frame: frame.with_columns(country=pl.concat_list("day", "user")),
        ("--slice", "country"),
        3,
        ("column country is List", "expected a value in each row"),
    ),
    "no such column": (lambda frame: frame, ("--user", "visitor"), 2, ("has no column visitor", "--user")),
    "no column of scores": (
        lambda frame: frame.drop("score"),
        (),
        2,
        ("has no column score or probability, expected one of label, id", "--score"),
    ),
    "no incumbent's column": (
        lambda frame: frame,
        ("--incumbent-score", "x"),
        2,
        ("has no column x", "--incumbent-score"),
    ),
    "no such file": (lambda frame: frame, ("none.parquet",), 3, ("the incumbent's file none.parquet does not exist",)),
    "an empty folder": (lambda frame: frame, ("folder.parquet",), 3, ("folder.parquet has no files",)),
    "no such format": (lambda frame: frame, ("old.txt",), 2, ("old.txt has a name that tells no format", ".parquet")),
    "no Parquet": (lambda frame: frame, ("broken.parquet",), 3, ("broken.parquet cannot be read as Parquet",)),
    "three files": (lambda frame: frame, ("old.parquet", "old.parquet"), 2, ("got 3 files",)),
    "an unknown setting": (lambda frame: frame, ("gate.max_nee=1",), 2, ("did you mean gate.max_ne?",)),
    "a setting of something else": (
        lambda frame: frame,
        ("train.lr=0.1",),
        2,
        ("train.lr=0.1 is no setting of the gate", "nightjar explain gate"),
    ),
    "gate.slices": (lambda frame: frame, ("gate.slices=[country]",), 2, ("gate.slices has no effect", "--slice")),
    "gate.max_rows": (lambda frame: frame, ("gate.max_rows=10",), 2, ("gate.max_rows has no effect", "leave out")),
    "another protocol": (lambda frame: frame, ("nowhere://x.parquet",), 2, ("cannot be opened",)),
    "an unknown option": (lambda frame: frame, ("--models",), 2, ("does not know --models",)),
    "a drop below 0": (lambda frame: frame, ("--max-gauc-drop", "-1"), 2, ("--max-gauc-drop",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_counts_and_the_way_out(work: Path, nightjar, case: str) -> None:
    change, words, code, said = WRONG[case]
    change(pl.read_parquet("new.parquet")).write_parquet("candidate.parquet")
    pl.read_parquet("old.parquet").select("score", "id").write_parquet("bare.parquet")
    Path("broken.parquet").write_bytes(b"PAR1 and no more")
    Path("folder.parquet").mkdir()
    Path("old.txt").touch()
    done = nightjar("judge", "candidate.parquet", *words)
    assert done.returncode == code, done.stdout + done.stderr
    for text in said:
        assert text in done.stderr
    assert "Traceback" not in done.stderr and "PASS" not in done.stdout


def test_scores_that_are_missing_are_held(work: Path, nightjar) -> None:
    for value in (None, float("nan")):
        set_rows("score", {1: value, 2: value})(pl.read_parquet("new.parquet")).write_parquet("holes.parquet")
        for files, whose in (
            (("holes.parquet", "old.parquet"), "candidate"),
            (("old.parquet", "holes.parquet"), "incumbent"),
        ):
            done = nightjar("judge", *files)
            assert done.returncode == 6 and f"2 of the {whose}'s predictions are not finite" in done.stdout
            assert f"2 of the {whose}'s 12,000 scores are missing or NaN" in done.stdout + done.stderr


def test_too_few_rows_are_held(work: Path, nightjar) -> None:
    for name in ("new", "old"):
        pl.read_parquet(f"{name}.parquet").head(500).write_parquet(f"{name}.parquet")
    done = nightjar("judge", "new.parquet", "old.parquet")
    assert done.returncode == 6 and "500 rows scored, too few for 1,000 (gate.min_rows)" in done.stdout


def test_a_candidate_that_knows_nothing_is_held(work: Path, nightjar) -> None:
    """As the gate holds it: the rows may be right, and the model may have failed."""
    pl.read_parquet("new.parquet").with_columns(score=1 - pl.col("score")).write_parquet("wrong.parquet")
    done = nightjar("judge", "wrong.parquet", "old.parquet")
    assert done.returncode == 6 and "AUC is 0.2" in done.stdout and done.stderr == ""


def test_rows_of_no_weight_are_not_enough_rows(work: Path, nightjar) -> None:
    """They were counted, and 80 rows passed as 12,000."""
    frame = pl.read_parquet("both.parquet").with_columns(weight=(pl.int_range(pl.len()) % 150 == 0).cast(pl.Float64))
    frame.write_parquet("sparse.parquet")
    columns = ["--score", "new", "--incumbent-score", "old", "--weight", "weight"]
    done = nightjar("judge", "sparse.parquet", *columns, "gate.max_ne_increase=0.5")
    assert done.returncode == 6 and "80 rows scored, too few for 1,000 (gate.min_rows)" in done.stdout


def test_rows_whose_slice_is_not_judged_are_said(work: Path, nightjar) -> None:
    frame = pl.read_parquet("new.parquet")
    rare = pl.when(pl.int_range(pl.len()) % 200 == 0).then(pl.lit("is")).otherwise(pl.lit("de"))
    frame.with_columns(country=rare).write_parquet("new.parquet")
    done = nightjar("judge", "new.parquet", "old.parquet", "--slice", "country", "--slice", "day")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "slices of country: 60 of 12,000 rows have values that are too rare to be judged" in said
    assert "slices of day" not in said


def test_equal_scores_are_said(work: Path, nightjar) -> None:
    done = nightjar("judge", "new.parquet", "new.parquet")
    assert done.returncode == 0
    assert "the scores of candidate and incumbent are equal in all 12,000 rows" in " ".join(done.stdout.split())


def test_an_incumbent_whose_scores_are_no_probabilities_is_said(work: Path, nightjar) -> None:
    """Percentages of rare clicks all lie below 1; beside them any candidate is better."""
    pl.read_parquet("old.parquet").with_columns(pl.col("score") / 100).write_parquet("old.parquet")
    said = " ".join(nightjar("judge", "new.parquet", "old.parquet").stdout.split())
    assert re.search(r"calibration of the incumbent is 0.01\d\d \[.*\], beyond 10.0%: its NE is that of these", said)
    assert "calibration of the incumbent" not in nightjar("judge", "new.parquet").stdout


def test_a_file_without_rows_in_a_folder_is_none(work: Path, nightjar, plain: GateRecord) -> None:
    frame = pl.read_parquet("old.parquet")
    Path("old").mkdir()
    for name, part in (("a", frame.clear()), ("b", frame.head(5000)), ("c", frame.slice(5000))):
        part.write_csv(f"old/{name}.csv")
    done = nightjar("judge", "new.parquet", "old", "--json")
    assert done.returncode == 0, done.stderr
    assert without_names(record_of(done)) == without_names(plain)


def test_of_two_columns_of_one_name_none_is_taken(work: Path, nightjar) -> None:
    """As pandas writes a frame that was put together of two."""
    frame = pl.read_parquet("both.parquet").select("label", "new", "old")
    text = frame.write_csv().partition("\n")[2]
    Path("twice.csv").write_text("label,score,score\n" + text)
    done = nightjar("judge", "twice.csv")
    assert done.returncode == 3 and "twice.csv has more than one column score" in done.stderr


def test_scores_of_0_and_1_count_as_nearly_certain(work: Path, nightjar) -> None:
    """They would cost infinitely much where they are wrong; their order stays."""
    frame = pl.read_parquet("new.parquet")
    wrong = int(np.flatnonzero(frame["label"].to_numpy() == 1)[0])
    for kind, cost in ((pl.Float64, 53 * np.log(2)), (pl.Float32, 53 * np.log(2))):
        set_rows("score", {wrong: 0.0})(frame).with_columns(pl.col("score").cast(kind)).write_parquet("sure.parquet")
        plain = frame.with_columns(pl.col("score").cast(kind))
        plain.write_parquet("plain.parquet")
        sure, unsure = (record_of(nightjar("judge", f"{name}.parquet", "--json")) for name in ("sure", "plain"))
        rate = sure.click_rate
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        rise = (cost + np.log(plain["score"][wrong])) / ROWS / entropy
        assert sure.candidate.ne.point - unsure.candidate.ne.point == pytest.approx(rise, rel=1e-6)


def test_the_command_needs_no_torch(work: Path) -> None:
    code = (
        "import sys; from pipeline.cli import main; code = main(['judge', 'old.parquet', 'new.parquet']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    assert done.stderr == "" and "HOLD" in done.stdout


def blocks(language: str) -> list[str]:
    """The blocks of docs/judge.md in ``language``."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "judge.md").read_text(), re.S | re.M)
    return [text for name, text in found if name == language]


def test_every_command_of_the_page_runs(tmp_path: Path, nightjar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    makes_files, calls = blocks("python")
    exec(makes_files, {})
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("nightjar ")]
    for line in lines:
        done = nightjar(*shlex.split(line)[1:])
        assert done.returncode == 0, line + done.stderr
    assert len(lines) > 6 and Path("verdict.html").exists()
    shown = nightjar(*shlex.split(lines[0])[1:]).stdout
    assert shown.rstrip() in [block.rstrip() for block in blocks("")], shown
    exec(calls, {})


# Candidate, incumbent, verdict, exit code.
ACTIONS = (("new", "old", "PASS", 0), ("old", "new", "HOLD", 6), ("new", "none", "", 3))


@pytest.mark.parametrize(("candidate", "incumbent", "verdict", "code"), ACTIONS)
def test_the_action_reports_the_verdict_and_fails_on_a_hold(
    work: Path, candidate: str, incumbent: str, verdict: str, code: int
) -> None:
    action = yaml.safe_load((ROOT / ".github/actions/judge/action.yml").read_text())
    _, step = action["runs"]["steps"]
    defaults = {f"${{{{ inputs.{name} }}}}": entry.get("default", "") for name, entry in action["inputs"].items()}
    given = {name: defaults[value] for name, value in step["env"].items()}
    given |= {"CANDIDATE": f"{candidate}.parquet", "INCUMBENT": f"{incumbent}.parquet"}
    given |= {"ARGUMENTS": "--slice country gate.max_psi=null"}
    given |= {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary"}
    given |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    Path("output").touch()
    done = subprocess.run(bash, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    written = Path("output").read_text(), Path("summary").read_text().partition("\n")[0]
    assert written == ((f"verdict={verdict}\n", f"# Gate: {verdict}") if verdict else ("", ""))
    assert Path("verdict.html").exists() == bool(verdict)
