"""A night whose settings narrow what a model sees: the version that serves is judged on what it would see, or held."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.records import GateRecord, read
from pipeline.store import Store
from tests.setting_paths import LEAVES
from tests.tiers import with_slow

STAGES = "stages=[ingest,plan,partition,train,evaluate,publish]"
RUN = [
    STAGES,
    STAGES.replace("stages", "launch.inline"),
    "data=csv",
    "data.name=ads",
    "data.label.column=click",
    "data.split.by=day",
    "data.day_column=day",
    "data.sparse_defaults.min_count=1",
    "+data.dense.price={transform: none}",
    "+data.sparse.tags={separator: ' '}",
    "+data.sparse.site={}",
    "+data.sequences.seen={features: {item: {column: shown}}, max_length: 6, separator: ' '}",
    "+model.sequences.seen={block: sum}",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "train.threads_per_rank=1",
    "train.global_batch=256",
    "train.warmup_steps=2",
    "train.precision=fp32",
    "train.epochs=2",
    "train.lr=0.01",
    "train.sparse_lr=0.2",
    "train.guard.collapse=false",
    "gate.importance_rows=0",
    "gate.min_rows=100",
    "gate.max_calibration_error=null",
    "gate.max_ne=null",
    "gate.min_baseline_gain=null",
    "gate.max_psi=null",
    "gate.max_label_shift=null",
    "gate.max_ne_drift=null",
    "gate.max_ne_increase=0.5",
    "gate.best_of_last=1",
    "publish.model=m",
    "publish.quantise=fp32",
]
# What narrows, and whether the dataset keeps enough to judge the version as it serves; else the night is held.
NARROWER = {
    "data.dense.price.clip=[0.5,0.6]": True,
    "data.sparse.tags.max_ids=2": False,
    "data.sparse.tags.separator=null": False,
    "data.sequences.seen.max_length=2": False,
    "data.missing=['',s1]": False,
    "data.strip=true": False,
    "data.quote=null": False,
}
# One that is judged, one of a feature, one of a sequence and one of the whole file; quotes have a test of their own.
SOONER = [
    "data.dense.price.clip=[0.5,0.6]",
    "data.sparse.tags.max_ids=2",
    "data.sequences.seen.max_length=2",
    "data.strip=true",
]


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Four tags a row, a price and a history that all matter."""
    rng, rows = np.random.default_rng(0), 3000
    tags, seen = rng.integers(0, 8, (rows, 4)), rng.integers(0, 8, (rows, 6))
    price, site = rng.random(rows), rng.integers(0, 4, rows)
    weight = np.array([1.0, -1.0, 0.7, -0.7, 0.5, -0.5, 0.2, -0.2])
    odds = weight[tags].sum(1) + 0.5 * weight[seen].sum(1) + 4 * (price - 0.5) + 0.3 * site
    frame = pl.DataFrame(
        {
            "click": (rng.random(rows) < 1 / (1 + np.exp(-odds))).astype(int),
            "price": price,
            "tags": [" ".join(f"t{tag}" for tag in each) for each in tags],
            "site": [f"s{each}" for each in site],
            "shown": [" ".join(f"i{item}" for item in each) for each in seen],
            "day": np.arange(rows) // (rows // 2),
        }
    )
    frame.write_csv(path := tmp_path_factory.mktemp("narrowed") / "log.csv")
    return path


def night(log: Path, store: Store, run: str, *more: str) -> tuple[int, GateRecord]:
    code = main(["run", *RUN, f"data.path={log}", f"store={store.url}", f"run={run}", *more])
    result = store.read_json(f"runs/{run}/result.json")
    return code, read(GateRecord, store, f"{result['stages']['publish']['artifact']}/gate.json")


@pytest.fixture(scope="module")
def store(log: Path, tmp_path_factory) -> Store:
    """A store with a version that sees everything."""
    place = Store(str(tmp_path_factory.mktemp("store")))
    code, _ = night(log, place, "first")
    assert code == 0
    return place


@pytest.fixture(scope="module")
def first(store: Store) -> float:
    """NE of the version that serves, as it was published."""
    version = store.read_json("models/m/current.json")["version"]
    candidate = read(GateRecord, store, f"models/m/{version}/gate.json").candidate
    assert candidate is not None
    return candidate.ne.point


def test_without_a_narrower_setting_the_version_scores_as_it_was_published(log: Path, store: Store, first) -> None:
    code, gate = night(log, store, "wide", "seed=3", "gate.max_ne_increase=0")
    assert code == 6 and gate.incumbent is not None
    assert gate.incumbent.ne.point == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("setting", with_slow(NARROWER, SOONER))
def test_a_night_that_sees_less_is_judged_as_the_version_serves_or_held(
    log: Path, store: Store, first, setting: str
) -> None:
    code, gate = night(log, store, f"n{list(NARROWER).index(setting)}", setting, "gate.max_ne_increase=0")
    assert code == 6 and gate.verdict == "HOLD"
    if NARROWER[setting]:
        assert gate.incumbent is not None and gate.candidate is not None
        assert gate.incumbent.ne.point == pytest.approx(first, abs=1e-6)
        assert gate.candidate.ne.point > first + 0.01, "the setting costs the candidate something"
        return
    name = setting.split("=")[0].split(".")[2 if setting.count(".") > 1 else 1]
    assert gate.incumbent is None and gate.not_comparable is not None and name in gate.not_comparable
    assert any("cannot be scored on these rows" in reason for reason in gate.reasons)


def test_a_column_that_the_log_renamed_is_judged_if_somebody_says_so(log: Path, store: Store, first, tmp_path) -> None:
    """A verdict that was found without the permission does not stand."""
    renamed, setting = tmp_path / "log.csv", "data.dense.price.column"
    renamed.write_text(log.read_text().replace("price", "cost", 1))
    changes = [f"{setting}=cost", "seed=3", "gate.max_ne_increase=0"]
    code, gate = night(renamed, store, "renamed", *changes)
    assert code == 6 and gate.incumbent is None
    assert gate.not_comparable is not None and f"checkpoint.allow=[{setting}]" in gate.not_comparable
    code, gate = night(renamed, store, "renamed", *changes, f"checkpoint.allow=[{setting}]")
    assert code == 6 and gate.incumbent is not None
    assert gate.incumbent.ne.point == pytest.approx(first, abs=1e-6)


def test_quotes_that_become_part_of_the_ids_hold_the_night(tmp_path: Path, log: Path) -> None:
    """Every id is then another one, which a candidate learns and the version that serves has never seen."""
    place, quoted = Store(str(tmp_path / "store")), tmp_path / "log.csv"
    pl.read_csv(log).write_csv(quoted, quote_style="non_numeric")
    header, _, rows = quoted.read_text().partition("\n")
    quoted.write_text(header.replace('"', "") + "\n" + rows)
    code, _ = night(quoted, place, "first")
    assert code == 0
    code, gate = night(quoted, place, "plain", "data.quote=null")
    assert code == 6 and gate.not_comparable is not None and "data.quote is None" in gate.not_comparable


def test_a_night_that_sees_more_cuts_for_the_version_what_it_would_cut(log: Path, tmp_path: Path) -> None:
    """Of a feature with one id a row there is nothing to cut."""
    place, limits = Store(str(tmp_path)), ("data.sparse.tags.max_ids", "data.sparse.site.max_ids")
    code, before = night(log, place, "first", *(f"{limit}=2" for limit in limits))
    assert code == 0 and before.candidate is not None
    code, gate = night(log, place, "wider", *(f"{limit}=9" for limit in limits), "gate.max_ne_increase=0")
    assert gate.incumbent is not None
    assert gate.incumbent.ne.point == pytest.approx(before.candidate.ne.point, abs=1e-6)


def test_a_model_without_some_features_is_not_published(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Store(str(tmp_path))
    arguments = [*RUN, f"data.path={log}", f"store={place.url}", "run=r", "data.leave_out=[site]"]
    assert main(["run", *arguments]) == 2
    assert "publish.judge_beside" in capsys.readouterr().err
    assert not place.names("models") and not place.names("datasets")


# Every setting of group data: what becomes of a version where a night changes it. A new setting needs a decision.
# It may change what a model sees of a row; rows keep what was cut off, or the version cannot be compared.
JUDGED_AS_IT_SERVES = """
    dense_transform dense.*.transform dense.*.clip dense.*.bins sparse.*.rows sparse.*.min_count
    sparse.*.when_full sparse.*.evict_after_days sparse.*.bins sparse.*.bins_by sparse_defaults.rows
    sparse_defaults.min_count sparse_defaults.when_full sparse_defaults.evict_after_days
    sequences.*.features.*.rows sequences.*.features.*.min_count
"""
# The rows do not show what the version would see of them. Columns, the clock and the label: unless checkpoint.allow
# names the setting, because the log changed. Limits: where they put rows into quarantine. A larger ``max_ids`` is cut.
HELD = """
    columns missing strip decimal quote dense.*.width dense.*.column sparse.*.column sparse.*.mapping
    sparse_defaults.mapping sparse.*.separator sparse_defaults.separator sparse.*.weight_separator
    sparse_defaults.weight_separator sparse.*.weights sparse.*.holds sparse.*.cross sparse.*.cross_bins
    sparse.*.integer sparse.*.table sparse.*.max_ids sequences.*.max_length sequences.*.time sequences.*.age_bins
    sequences.*.separator sequences.*.features.*.column sequences.*.features.*.table sequences.*.history.by
    sequences.*.history.days sequences.*.history.where sequences.*.history.lag_minutes timestamp time_zone time_format
    label.column label.positive label.negative dense.*.min dense.*.max dense.*.required sparse.*.required
    sequences.*.leaks tasks.*.column tasks.*.kind tasks.*.given tasks.*.positive tasks.*.negative
"""
# No night begins with it: a model without some features is judged only, beside a version that is named.
REFUSED = "leave_out"
# It says which rows there are and how a file is read: the same for both versions. Text that another separator cuts into
# the numbers of a vector is refused.
OF_ROWS = """
    name aside format path options snapshot messages separator header weight day_column hour_column day late late_days
    mapping_from max_quarantine_share dense_features dense.*.separator sequences.*.target label.* tasks.* sampling.*
    dedupe.* watermark.* checks.* split.* synthetic.* tables.* table_defaults.*
"""


def test_it_is_decided_of_every_setting_what_becomes_of_the_version_that_serves() -> None:
    listed = [set(names.split()) for names in (JUDGED_AS_IT_SERVES, HELD, REFUSED, OF_ROWS)]
    assert sum(map(len, listed)) == len(set.union(*listed)), "in two lists"
    every = set.union(*listed)
    known = {path.removeprefix("data.") for path in LEAVES if path.startswith("data.")}
    groups = {name.removesuffix(".*") for name in every if name.endswith(".*")}
    undecided = {path for path in known if path not in every and path.split(".")[0] not in groups}
    assert undecided == set(), "what becomes of the version that serves where a night changes them?"
    assert {name for name in every if not name.endswith(".*")} - known == set(), "no settings"
