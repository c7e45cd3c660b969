"""Held nights that are bisected for real, all stages in this process: a setting, dead features, turned labels.

``test_bisect.py`` has the search on records alone.
"""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.ingest.synthetic import write_tsv
from tests.schedule.test_cycle import WORLD, Nights

pytestmark = pytest.mark.slow
LIMIT = "gate.max_ne_drift=0.02"  # 1,400 rows tell a rise of about 4 %
RUN = "clicks-2026-01-03"
# Columns of a line by the name of its feature.
COLUMNS = {"I3": 3, "I5": 5, "I6": 6}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of logs and store of two published nights, with the log of a third day."""
    folder = tmp_path_factory.mktemp("published") / "nights"
    (folder / "logs").mkdir(parents=True)
    config = compose(list(WORLD))
    for day in (1, 2, 3):
        write_tsv(config.data.synthetic, config.seed, f"{folder}/logs/2026-01-0{day}.tsv", date(2026, 1, day))
    nights = Nights(folder)
    for day in ("01", "02"):
        nights.night(day, LIMIT)
        assert nights.codes[day] == 0, nights.said[day]
    return folder


def held(published: Path, folder: Path, spoil=lambda fields: None, *overrides: str) -> Nights:
    """A copy of the ``published`` nights, and the third one with the fields of each line as ``spoil`` leaves them."""
    shutil.copytree(published, folder)
    log = folder / "logs" / "2026-01-03.tsv"
    lines = []
    for line in log.read_text().splitlines():
        fields = line.split("\t")
        spoil(fields)
        lines.append("\t".join(fields) + "\n")
    log.write_text("".join(lines))
    nights = Nights(folder)
    nights.night("03", LIMIT, *overrides)
    assert nights.codes["03"] == 6, nights.said["03"]
    nights.served["before"] = (folder / "store" / "models" / "clicks" / "current.json").read_text()
    return nights


def bisect(nights: Nights) -> dict:
    """The answer of the command, which has left what serves and the versions of the model as they were."""
    versions = nights.store.names("models/clicks")
    nights.call("bisect", "bisect", RUN, "--store", nights.store.url)
    assert nights.codes["bisect"] == 0, nights.said["bisect"]
    assert nights.served["bisect"] == nights.served["before"]
    assert nights.store.names("models/clicks") == versions
    found: dict = nights.store.read_json(f"runs/{RUN}/bisect.json")
    assert found["culprit"]["words"] in nights.said["bisect"]
    assert nights.record("03")["culprit"] == found["culprit"]["words"]
    return found


def test_a_learning_rate_that_ruins_the_model_is_found_by_one_replay(published: Path, tmp_path: Path) -> None:
    ruined = held(published, tmp_path / "nights", lambda fields: None, "train.lr=0.3", "checkpoint.allow=[train.lr]")
    found = bisect(ruined)
    assert (found["culprit"]["kind"], found["culprit"]["names"]) == ("settings", ["train.lr"])
    assert found["culprit"]["passes"] and "the gate passes" in found["culprit"]["words"]
    (replay,) = found["replays"]
    assert replay["verdict"] == "PASS" and replay["ne"] < found["ne"] and replay["change"][2] < 0
    ingested = [ruined.store.read_json(f"runs/{run}/result.json")["stages"] for run in (RUN, replay["run"])]
    assert ingested[0]["ingest"]["artifact"] == ingested[1]["ingest"]["artifact"], "only what changed is made again"
    assert ingested[1]["ingest"]["status"] == "skipped"


def test_features_that_are_constant_from_today_on_are_named_and_the_days_dataset_stays(
    published: Path, tmp_path: Path
) -> None:
    def kill(fields: list[str]) -> None:
        for column in COLUMNS.values():
            fields[column] = "1"

    nights = held(published, tmp_path / "nights", kill)
    datasets = nights.store.names("datasets/criteo/2026-01-03")
    found = bisect(nights)
    assert found["culprit"]["kind"] == "features"
    assert "I3" in found["culprit"]["names"] and set(found["culprit"]["names"]) <= set(COLUMNS)
    assert len(found["replays"]) == 1 and found["culprit"]["explained"] >= 0.5
    assert found["replays"][0]["change"] is not None, "judged on the same test rows"
    assert nights.store.names("datasets/criteo/2026-01-03") == datasets
    assert len(nights.store.names("datasets/criteo.aside/2026-01-03")) == 1


def test_labels_that_are_turned_need_no_replay(published: Path, tmp_path: Path) -> None:
    def turn(fields: list[str]) -> None:
        fields[0] = "1" if fields[0] == "0" else "0"

    nights = held(published, tmp_path / "nights", turn)
    found = bisect(nights)
    assert (found["culprit"]["kind"], found["replays"]) == ("labels", [])
    nights.call("json", "bisect", RUN, "--store", nights.store.url, "--replays", "0", "--json")
    assert nights.codes["json"] == 0
    assert '"culprit"' in nights.said["json"] and json.loads(nights.said["json"][nights.said["json"].index("{") :])
