"""Who names what: by the registered kinds of records; what cannot be read stops a removal."""

import os
from pathlib import Path

import pytest

from pipeline.core.errors import DamagedError
from pipeline.store import Store, references
from pipeline.store.references import RECORDS, RecordKind, References, of_run, of_versions, pins

CHECKPOINT = "runs/r/checkpoints/k/step-00000007"


@pytest.fixture(params=["disk", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path) if request.param == "disk" else f"memory://references-{os.urandom(4).hex()}")


def put(store: Store, path: str, inputs: dict[str, str], **summary: object) -> None:
    with store.draft(path, kind="made", key="k", config={}, inputs=inputs) as draft:
        draft.commit(summary)


def test_a_version_refers_to_its_inputs_its_dataset_its_run_and_its_checkpoint(store: Store) -> None:
    put(store, "models/m/v1", {"plan": "aa"}, run="r2", dataset="datasets/d/bb", made={"of": [CHECKPOINT]})
    named = of_versions(store)["models/m/v1"]
    assert named.keys == {"aa", "bb"} and named.runs == {"r", "r2"} and named.checkpoints == {CHECKPOINT}
    assert pins(store) == {CHECKPOINT: "models/m/v1/manifest.json"}


def test_a_run_refers_to_what_it_was_made_of_and_what_it_began_from_where_it_may_go_on(store: Store) -> None:
    put(store, "runs/r/train/t", {"ingest": "aa"}, final=CHECKPOINT)
    put(store, "runs/r/evaluate/e", {"plan": "bb"})
    steps = [{"name": "plan", "key": "cc"}, {"name": "train", "key": "own"}]
    store.write_json("runs/r/steps.json", {"version": 1, "steps": steps})
    store.write_json("runs/r/result.json", {"stages": {"ingest": {"artifact": "datasets/d/dd"}}})
    store.write_json("runs/r/nightly.json", {"base": {"run": "before", "dataset": "datasets/d/ee", "plan": "plans/ff"}})
    store.write_bytes("runs/r/config.yaml", b"checkpoint: {init_from: runs/older/checkpoints/k/step-00000001}\n")
    kept = of_run(store, "r", starts=False)
    assert (kept.keys, kept.meant, kept.runs) == ({"aa", "bb", "dd"}, {"cc"}, set())
    goes_on = of_run(store, "r", starts=True)
    assert goes_on.keys == {"aa", "bb", "dd", "ee", "ff"} and goes_on.runs == {"before", "older"}
    assert of_run(store, "another", starts=True) == References()


def test_of_trainings_only_the_runs_own_pin_its_checkpoints(store: Store) -> None:
    put(store, "runs/r/train/t", {}, final=CHECKPOINT)
    assert list(pins(store)) == list(pins(store, "r")) == [CHECKPOINT]
    assert pins(store, "") == pins(store, "another") == {}


def test_a_kind_of_record_that_a_room_adds_is_respected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = RecordKind(
        name="drift page",
        pattern="runs/*/drift.json",
        pins=True,
        refers=lambda record: References(keys=frozenset({record["dataset"]}), checkpoints=frozenset({CHECKPOINT})),
    )
    monkeypatch.setattr(references, "RECORDS", [*RECORDS, kind])
    store.write_json("runs/r/drift.json", {"dataset": "aa"})
    assert of_run(store, "r", starts=False).keys == {"aa"}
    assert pins(store) == {CHECKPOINT: "runs/r/drift.json"}
    store.write_json("runs/r/drift.json", {})
    with pytest.raises(DamagedError, match="runs/r/drift.json is not a record of a drift page.* refers to is unknown"):
        pins(store)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("models/m/v1/manifest.json", b"{"),
        ("models/m/v1/manifest.json", b'{"schema_version": 2, "inputs": {}}'),
        ("models/m/v1/manifest.json", b'{"something": "else"}'),
        ("runs/r/train/t/manifest.json", b"[]"),
    ],
)
def test_a_manifest_that_cannot_be_read_stops_a_removal(store: Store, path: str, content: bytes) -> None:
    store.write_bytes(path, content)
    with pytest.raises(DamagedError, match=f"{path} .*what it refers to is unknown") as caught:
        pins(store)
    assert "until then nothing is removed" in caught.value.hint


def test_the_manifest_of_another_program_counts_without_a_seal(store: Store) -> None:
    store.write_json("models/m/v1/manifest.json", {"summary": {"from": CHECKPOINT}})
    assert list(pins(store)) == [CHECKPOINT]
    assert of_versions(store)["models/m/v1"].runs == {"r"}
