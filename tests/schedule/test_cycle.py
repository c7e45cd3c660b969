"""Three nights as they are typed, all stages in this process: the first model, a warm start, spoilt labels."""

import contextlib
import io
import json
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
from markupsafe import escape

from pipeline import cli
from pipeline.config.compose import compose
from pipeline.core.units import decimal
from pipeline.ingest.synthetic import write_tsv
from pipeline.store import Store
from tests.schedule.test_webhook import Hook, serving

SETTINGS = (
    "data.sparse_defaults.min_count=1",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "train.threads_per_rank=1",
    "train.global_batch=256",
    "train.lr=0.01",
    "train.sparse_lr=0.2",
    "train.warmup_steps=5",
    "train.precision=fp32",
    "train.schedule=linear",
    "train.decay_ratio=0.3",
    "gate.max_calibration_error=0.25",  # 22 steps
    "launch.inline=[ingest,plan,partition,train,evaluate,publish]",
    "gate.max_psi=null",
    "gate.replicates=50",
    "gate.max_ne_increase=0.05",
    "gate.min_baseline_gain=null",  # what 1,400 held-out rows tell; after 22 steps
    "publish.model=clicks",
    "nightly.wait_minutes=0",
)
FEW = tuple(f"~data.sparse.C{number}" for number in range(9, 27))
WORLD = ("data.synthetic.rows=7000", "data.synthetic.ids_per_feature=200", "data.synthetic.new_ids=0.02")


@dataclass
class Nights:
    """What the nights left: the exit code and the output of each command, and their store."""

    folder: Path
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    served: dict[str, str | None] = field(default_factory=dict)
    posted: list[dict] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "store"))

    def call(self, label: str, *arguments: str) -> None:
        """Run the command line; remember what came out, and which version serves afterwards."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            self.codes[label] = cli.main(arguments)
        self.said[label] = out.getvalue()
        current = self.folder / "store" / "models" / "clicks" / "current.json"
        self.served[label] = current.read_text() if current.exists() else None

    def night(self, label: str, *overrides: str) -> None:
        """``nightjar nightly`` of the day that is the first two letters of ``label``."""
        logs = f'data.path="{self.folder}/logs/{{day}}.tsv"'
        day = f"date=2026-01-{label[:2]}"
        settings = (f"store={self.folder}/store", *SETTINGS, "gate.budget=20", *overrides)
        self.call(label, "nightly", day, "data=criteo", logs, *settings)

    def record(self, day: str) -> dict:
        """The night's record."""
        record: dict = self.store.read_json(f"runs/clicks-2026-01-{day}/nightly.json")
        return record


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """01 and 02 as usual, 03 with every fourth row a click, and the last two called again."""
    folder = tmp_path_factory.mktemp("nights")
    (folder / "logs").mkdir()
    config = compose(list(WORLD))
    for day in (1, 2, 3):
        write_tsv(config.data.synthetic, config.seed, f"{folder}/logs/2026-01-0{day}.tsv", date(2026, 1, day))
    spoilt = folder / "logs" / "2026-01-03.tsv"
    lines = spoilt.read_text().splitlines(keepends=True)
    spoilt.write_text("".join(f"1{line[1:]}" if i % 4 == 0 else line for i, line in enumerate(lines)))
    found = Nights(folder)
    found.night("01", *FEW)
    found.night("02", *FEW)
    with serving(200) as url:
        found.night("03", *FEW, f"nightly.webhook={url}")
        found.posted = list(Hook.bodies)
    found.night("02 again", *FEW)
    found.night("03 again", *FEW)
    found.night("04", *FEW)
    found.night("01 forced", *FEW, "force=true")
    return found


def test_the_first_night_trains_from_scratch_and_publishes(nights: Nights) -> None:
    assert nights.codes["01"] == 0, nights.said["01"]
    record = nights.record("01")
    assert record["outcome"] == "published"
    assert record["base"] is None
    assert record["changed"] == ["the first version, trained from scratch with new id mappings"]
    assert json.loads(nights.served["01"] or "")["version"] == record["version"]


def test_the_second_one_goes_on_from_what_serves_and_carries_its_mappings(nights: Nights) -> None:
    assert nights.codes["02"] == 0, nights.said["02"]
    first, second = nights.record("01"), nights.record("02")
    assert second["base"]["version"] == first["version"]
    assert f"warm start from {first['version']} (2026-01-01)" in nights.said["02"]
    assert f"starting from {second['base']['checkpoint']}" in nights.said["02"]
    config = nights.store.read_json("runs/clicks-2026-01-02/steps.json")["steps"][0]["config"]
    assert config["data"]["mapping_from"] == second["base"]["dataset"]
    assert second["incumbent"] == first["version"]
    assert second["ne"] == pytest.approx(second["incumbent_ne"], rel=0.05)  # not a model that begins anew
    assert second["ne"] != second["incumbent_ne"]
    assert json.loads(nights.served["02"] or "")["version"] == second["version"]
    assert any("the plan was rebuilt: table C" in line for line in second["changed"])
    assert any(line.startswith("7,000 rows, +0.0% on 2026-01-01") for line in second["changed"])
    assert set(second["seconds"]) == {"ingest", "plan", "partition", "train", "evaluate", "publish"}


def test_each_night_spends_its_share_once(nights: Nights) -> None:
    """Not the first one, which is compared with nothing, and not those that have their verdict."""
    records = {day: nights.record(day) for day in ("01", "02", "03")}
    assert "budget" not in records["01"]
    looks = nights.store.read_json("models/clicks/budget.json")["looks"]
    assert [(look["day"], look["candidate"], look["verdict"]) for look in looks] == [
        (f"2026-01-{day}", records[day]["version"], records[day]["verdict"]) for day in ("02", "03")
    ]
    assert [look["alpha"] for look in looks] == pytest.approx([0.8 * 20 / 365] * 2)
    words = "2 looks in the year to 2026-01-03 spent 0.088 of gate.budget=20"
    for page in ("index.html", "runs/clicks-2026-01-03/nightly.html", "runs/clicks-2026-01-03/nightly.md"):
        assert words in Path(nights.store.full(page)).read_text(), page


def test_spoilt_labels_are_held_and_what_serves_stays(nights: Nights) -> None:
    assert nights.codes["03"] == 6, nights.said["03"]
    assert nights.served["03"] == nights.served["02"]
    record = nights.record("03")
    assert record["outcome"] == "held"
    assert record["verdict"] == "HOLD"
    reasons = " ".join(record["reasons"])
    assert "calibration of the incumbent" in reasons
    assert "NE of the incumbent" in reasons
    assert record["incumbent"] == nights.record("02")["version"]


def test_the_verdict_is_posted(nights: Nights) -> None:
    (posted,) = nights.posted
    assert posted["verdict"] == "HOLD"
    assert posted["exit_code"] == 6
    assert posted["date"] == "2026-01-03"
    assert posted["reasons"] == nights.record("03")["reasons"]
    assert posted["text"].startswith("Nightjar: 2026-01-03 of model clicks: HELD")
    config = (nights.folder / "store" / "runs" / "clicks-2026-01-03" / "config.yaml").read_text()
    assert "/hook/secret" not in config


@pytest.mark.parametrize(("label", "code", "word"), [("02 again", 0, "PUBLISHED"), ("03 again", 6, "HELD")])
def test_a_night_that_has_its_verdict_only_says_so(nights: Nights, label: str, code: int, word: str) -> None:
    assert nights.codes[label] == code
    assert f"2026-01-{label[:2]} of model clicks: {word}" in nights.said[label]
    assert "nothing to do: force=true runs it again" in nights.said[label]
    assert "train" not in nights.said[label]
    assert nights.served[label] == nights.served["02"]


def test_a_day_without_logs_ends_with_3_and_says_what_is_missing(nights: Nights) -> None:
    assert nights.codes["04"] == 3
    assert "2026-01-04 is not complete: there are no files at" in nights.said["04"]
    assert nights.record("04")["outcome"] == "failed"
    assert nights.served["04"] == nights.served["02"]


def test_nights_go_forwards(nights: Nights) -> None:
    assert nights.codes["01 forced"] == 2
    version = nights.record("02")["version"]
    said = nights.said["01 forced"]
    assert f"the serving version {version} of model 'clicks' was trained on 2026-01-02, which is not before" in said
    assert "nightjar rollback clicks" in said
    assert nights.record("01")["outcome"] == "published"


def test_the_summary_says_it_on_one_page(nights: Nights) -> None:
    folder = nights.folder / "store" / "runs"
    held = (folder / "clicks-2026-01-03" / "nightly.html").read_text()
    assert "Reasons for the hold" in held
    assert "What to do: " in held and "nightjar models promote clicks" in held
    assert "keeps serving" in held
    text = (folder / "clicks-2026-01-02" / "nightly.md").read_text()
    record = nights.record("02")
    for figure in (f"{record['ne']:.4f}", f"{record['incumbent_ne']:.4f}", "7,000", "| train |", record["version"]):
        assert figure in text
    missing = (folder / "clicks-2026-01-04" / "nightly.md").read_text()
    assert "there are no files at" in missing
    assert (
        "What to do: nightjar nightly date=2026-01-04 with the same overrides, once the logs are delivered" in missing
    )


def test_the_page_of_the_store_and_the_list_show_the_nights(nights: Nights) -> None:
    page = (nights.folder / "store" / "index.html").read_text()
    for day in ("01", "02", "03"):
        record = nights.record(day)
        assert f'href="runs/clicks-2026-01-{day}/nightly.html"' in page
        assert decimal(record["ne"]) in page
    held = nights.record("03")
    assert held["outcome"] == "held" and escape(held["reasons"][0]) in page
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["nights", "ls", "--json", "--store", nights.store.url]) == 0
    answer = json.loads(out.getvalue())
    listed = {night["date"]: night for night in answer["nights"]}
    assert listed["2026-01-03"]["outcome"] == "held" and listed["2026-01-04"]["outcome"] == "failed"
    assert listed["2026-01-02"]["ne"][0] == nights.record("02")["ne"]
    gate = nights.store.read_json(f"{Path(held['gate_page']).parent}/gate.json")
    assert listed["2026-01-03"]["calibration"] == gate["candidate"]["calibration"]
    current = json.loads(nights.served["01 forced"] or "")
    assert answer["served"]["clicks"][-1]["version"] == current["version"]
    assert len(answer["served"]["clicks"]) == len(current["log"])
