"""Which version serves: promote, roll back, collect; atomic under kill -9; messages for what cannot be."""

import json
import multiprocessing
import shutil
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

import tests.embeddings.ranks  # noqa: F401 (it says what the fork server imports)
from pipeline.cli import main
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError, LaunchError
from pipeline.publishing import model_commands, promotion, versions
from pipeline.records.model_version import CardPlan, Lineage, ModelCard, Verdict
from pipeline.report.models import details, listing
from pipeline.stages import release
from pipeline.stages.release import _require_same_incumbent, publish
from pipeline.store import Store
from tests.logged import listen
from tests.publishing.made import plain
from tests.records.made import gate_record
from tests.waits import PATIENCE

A, B, C, D = (f"v0000{n}-aaaaaaaa" for n in (1, 2, 3, 4))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(str(tmp_path / "store"))
    for name in (A, B, C):
        plain(made, name)
    return made


def promote(store: Store, *names: str) -> None:
    for name in names:
        promotion.promote(store, "m", name, by="publish")


def test_the_line_of_versions_grows_and_a_rollback_takes_off(store: Store) -> None:
    assert promotion.incumbent(store, "m") is None
    promote(store, A, B, C)
    current = promotion.read_current(store, "m")
    assert (current.version, current.previous, current.line) == (C, B, (A, B, C))
    assert promotion.roll_back(store, "m", "complaints").version == B
    again = promotion.roll_back(store, "m")
    assert (again.version, again.previous) == (A, None)
    found = promotion.incumbent(store, "m")
    assert found is not None and found.path == f"models/m/{A}"
    log = store.read_json("models/m/current.json")["log"]
    assert [entry["by"] for entry in log] == ["publish"] * 3 + ["rollback"] * 2
    assert log[3]["reason"] == "complaints" and log[3]["instead_of"] == C


def test_a_rollback_to_a_version_of_the_same_training_says_that_it_is_the_same_model(store: Store) -> None:
    """A night that was forced publishes its training once more, and whoever rolls back wants another model."""
    forced = "v00005-aaaaaaaa"
    for name in (D, forced):
        plain(store, name, train="t")
    promote(store, A, D, forced)
    said = listen()
    assert promotion.roll_back(store, "m", "complaints").version == D
    (words,) = said
    assert words.startswith(f"{D} is of the same training as {forced}, so it is the same model; ")
    assert words.endswith(f"nightjar rollback m once more goes back to {A}")
    assert promotion.roll_back(store, "m", "complaints").version == A and len(said) == 1


@pytest.mark.parametrize("manifest", [None, b"no manifest"])
def test_a_rollback_does_not_depend_on_the_version_that_served(store: Store, manifest: bytes | None) -> None:
    """It is taken back because something is wrong with it."""
    promote(store, A, B)
    file = f"models/m/{B}/manifest.json"
    if manifest is None:
        store.fs.rm(store.full(file))
    else:
        store.write_bytes(file, manifest)
    assert promotion.roll_back(store, "m", "complaints").version == A


def test_promoting_what_serves_changes_nothing(store: Store) -> None:
    promote(store, A)
    before = store.read_json("models/m/current.json")
    promote(store, A)
    assert store.read_json("models/m/current.json") == before


def test_there_must_be_something_to_go_back_to(store: Store) -> None:
    with pytest.raises(ConfigError, match="no previous version to roll back to: nothing was published"):
        promotion.roll_back(store, "m")
    promote(store, A)
    with pytest.raises(ConfigError, match=f"{A} is the first serving version"):
        promotion.roll_back(store, "m")


def test_only_whole_versions_serve(store: Store) -> None:
    promote(store, A)
    with pytest.raises(ArtifactError, match="has no version 'v00009-aaaaaaaa' in store .*; available: v00001"):
        promote(store, "v00009-aaaaaaaa")
    Path(store.full(f"models/m/{B}/tables/a.rows")).write_bytes(b"xx")
    with pytest.raises(ArtifactError, match="is 2 bytes, expected 3"):
        promote(store, B)
    assert promotion.read_current(store, "m").version == A


def test_a_version_that_was_held_needs_a_reason(store: Store) -> None:
    plain(store, D, verdict="HOLD")
    with pytest.raises(ConfigError, match=f"the gate held {D} of model 'm'"):
        promotion.promote(store, "m", D, by="promote")
    assert promotion.promote(store, "m", D, by="promote", reason="known traffic").version == D


def test_numbers_rise_and_keys_tell_versions_apart(store: Store) -> None:
    assert versions.new_version(store, "m", "0123456789abcdef") == "v00004-01234567"
    assert versions.new_version(store, "other", "0123456789abcdef") == "v00001-01234567"
    plain(store, "v00006-cccccccc", key="c" * 32)
    found = versions.made_by(store, "m", "c" * 32)
    assert found is not None and found.path.endswith("v00006-cccccccc")
    assert versions.made_by(store, "m", "d" * 32) is None


def test_gc_never_removes_what_serves_nor_what_a_rollback_restores(store: Store) -> None:
    plain(store, D)
    Path(store.full("models/m/v00005-aaaaaaaa")).mkdir()
    left = Path(store.full("models/m/.write-abc"))
    left.touch()
    promote(store, A, B)
    tried = model_commands.collect(store, "m", 0, 0.0, dry_run=True)
    assert [each.version for each in tried] == [C, D, "v00005-aaaaaaaa"]
    gone = model_commands.collect(store, "m", 1, 0.0, dry_run=False)
    assert [each.version for each in gone] == [C, "v00005-aaaaaaaa"]
    assert [each.reason for each in gone] == ["not among the newest 1", "never finished"]
    assert [each.version for each in model_commands.list_versions(store, "m").versions] == [
        A,
        B,
        D,
    ] and not left.exists()
    assert model_commands.collect(store, "m", 0, 3600.0, dry_run=False) == [], "what is young may be in the making"
    assert promotion.roll_back(store, "m").version == A


@pytest.mark.parametrize("twins", [1, 2])
def test_gc_keeps_another_model_to_go_back_to_behind_versions_of_the_same_training(store: Store, twins: int) -> None:
    """A night that was forced publishes its training once more: a rollback to that changes nothing."""
    same = [f"v0000{number}-aaaaaaaa" for number in range(4, 5 + twins)]
    for name in same:
        plain(store, name, train="t")
    promote(store, A, B, *same)
    gone = model_commands.collect(store, "m", 1, 0.0, dry_run=False)
    assert [each.version for each in gone] == [A, C]
    for expected in (*reversed(same[:-1]), B):
        assert promotion.roll_back(store, "m").version == expected
    assert [each.version for each in model_commands.collect(store, "m", 0, 0.0, dry_run=True)] == same


def test_gc_asks_the_log_about_versions_that_are_gone_or_damaged(store: Store) -> None:
    promote(store, A, B, C)
    store.write_bytes(f"models/m/{C}/manifest.json", b"no manifest")
    assert [each.version for each in model_commands.collect(store, "m", 0, 0.0, dry_run=False)] == [A]
    shutil.rmtree(store.full(f"models/m/{B}"))
    assert model_commands.collect(store, "m", 0, 0.0, dry_run=False) == []


def test_gc_leaves_a_version_in_the_making_in_an_object_store(tmp_path: Path) -> None:
    """Object stores have no times of folders, and call those of files otherwise than a disk does."""
    store = Store(f"memory:/{tmp_path}")
    store.write_bytes(f"models/m/{A}/tables/a.rows", b"half a table")
    assert model_commands.collect(store, "m", 0, 3600.0, dry_run=False) == []
    assert [each.version for each in model_commands.collect(store, "m", 0, 0.0, dry_run=False)] == [A]
    assert not store.exists(f"models/m/{A}")


def test_a_version_in_the_making_is_listed_and_only_damage_is_an_error(store: Store, capsys) -> None:
    """Somebody looks while a night publishes; then what serves is removed by hand."""
    promote(store, A)
    Path(store.full(f"models/m/{D}/tables")).mkdir(parents=True)
    assert main(["models", "ls", "--store", store.url]) == 0
    assert f"  {D}    not finished: it is being written" in capsys.readouterr().out
    shutil.rmtree(store.full(f"models/m/{A}"))
    assert main(["models", "ls", "--store", store.url]) == 7
    assert f"> {A}    it has no manifest, but current.json names it" in capsys.readouterr().out


def test_a_damaged_current_json_is_said_not_guessed(store: Store) -> None:
    promote(store, A)
    Path(store.full("models/m/current.json")).write_text('{"format": 99}')
    with pytest.raises(ArtifactError, match="does not say which version serves: format 99, expected 1"):
        promotion.incumbent(store, "m")


def test_an_incumbent_that_was_removed_is_said(store: Store) -> None:
    promote(store, A)
    Path(store.full(f"models/m/{A}/manifest.json")).unlink()
    with pytest.raises(ArtifactError, match=f"names {A}, which does not exist") as caught:
        promotion.incumbent(store, "m")
    # The first version has no rollback, so the hint names what does help.
    assert caught.value.hint == f"nightjar models promote m {C} --reason '...'"


def test_a_removed_incumbent_has_a_rollback_where_the_version_before_is_whole(store: Store) -> None:
    promote(store, A, B)
    shutil.rmtree(store.full(f"models/m/{B}"))
    with pytest.raises(ArtifactError) as caught:
        promotion.incumbent(store, "m")
    assert caught.value.hint.startswith("nightjar rollback m, or nightjar models promote m ")
    assert promotion.roll_back(store, "m").version == A


def test_after_the_last_version_was_removed_the_hint_starts_anew(store: Store) -> None:
    promote(store, A)
    for name in (A, B, C):
        shutil.rmtree(store.full(f"models/m/{name}"))
    with pytest.raises(ArtifactError) as caught:
        promotion.incumbent(store, "m")
    current = Path(store.full("models/m/current.json"))
    assert f"move {current} away" in caught.value.hint
    current.unlink()
    assert promotion.incumbent(store, "m") is None


def test_a_training_in_service_is_compared_with_the_version_of_its_verdict_although_that_is_gone(store: Store) -> None:
    """A held version that somebody promoted would pass as a first one, and replace its own HOLD."""
    plain(store, D, verdict="HOLD", train="t", incumbent=A)
    promotion.promote(store, "m", D, by="promote", reason="checked by hand")
    config = compose(["publish.model=m"])
    assert release.covered_incumbent(config, store, "t") == A
    shutil.rmtree(store.full(f"models/m/{A}"))
    assert release.covered_incumbent(config, store, "t") == A


def flip(store: Store, file: str) -> None:
    """Change one byte; the size stays."""
    path = Path(store.full(file))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_does_not_serve(store: Store) -> None:
    with store.draft(f"models/m/{D}", kind="model", key="k" * 32, config={}, inputs={}) as draft:
        for name in ("serving.json", "tables/a.rows"):
            with draft.open(name) as sink:
                sink.write(b"0123456789")
        draft.commit({"verdict": "PASS"})
    promote(store, D, A)
    flip(store, f"models/m/{D}/tables/a.rows")
    with pytest.raises(ArtifactError, match=r"a\.rows is corrupt") as caught:
        promotion.promote(store, "m", D, by="promote")
    assert "nightjar models ls m" in caught.value.hint
    flip(store, f"models/m/{D}/serving.json")
    with pytest.raises(ArtifactError, match=r"serving\.json is corrupt"):
        promotion.roll_back(store, "m")
    assert promotion.read_current(store, "m").version == A


def test_what_serves_by_now_may_refuse_a_promotion(store: Store) -> None:
    def refuse() -> None:
        raise LaunchError("another one serves by now")

    promote(store, A)
    with pytest.raises(LaunchError, match="another one serves by now"):
        promotion.promote(store, "m", B, by="publish", check=refuse)
    assert promotion.read_current(store, "m").version == A
    assert promotion.promote(store, "m", A, by="publish", check=refuse).line == (A,)


def test_a_verdict_beside_another_incumbent_is_not_published(store: Store) -> None:
    """Somebody promotes or rolls back while a night trains."""
    config, record = compose(["publish.model=m"]), SimpleNamespace(version=C, incumbent_version=A)
    promote(store, A)
    _require_same_incumbent(config, store, "k", record)
    promote(store, B)
    with pytest.raises(LaunchError, match=f"{C} .* passed the gate beside {A}, but by now {B} serves") as caught:
        _require_same_incumbent(config, store, "k", record)
    assert f"nightjar models promote m {C}" in caught.value.hint


class Publishing:
    """The publish stage of one training, called "t", on versions that are judged already."""

    def __init__(self, store: Store):
        self.store, self.config = store, compose(["publish.model=m"])

    def judged(self, version: str, key: str, incumbent: str | None) -> None:
        """A version of the training, which passed beside ``incumbent``."""
        plain(self.store, version, key=key, incumbent=incumbent, train="t")
        record = gate_record(version=version, incumbent_version=incumbent, model="m")
        self.store.write_json(f"models/m/{version}/gate.json", record.to_json())

    def run(self, key: str) -> dict:
        """The stage's summary."""
        inputs = {"train": SimpleNamespace(key="t")}
        with self.store.draft("publish/x", kind="publish", key="x", config={}, inputs={}) as draft:
            summary = publish(self.config, self.store, SimpleNamespace(key=key), inputs, draft)
            assert self.store.read_json("publish/x/gate.json")["verdict"] == summary["gate"]["verdict"]
            return summary

    def held(self, key: str) -> str:
        """The only reason why the stage holds the version; what serves stays as it is."""
        before = self.store.read_json("models/m/current.json")
        summary = self.run(key)
        assert "model" not in summary and summary["gate"]["verdict"] == "HOLD"
        assert self.store.read_json("models/m/current.json") == before
        (reason,) = summary["gate"]["reasons"]
        return str(reason)


V4, V5, KEY, OTHER_KEY = "v00004-dddddddd", "v00005-eeeeeeee", "d" * 32, "e" * 32


@pytest.fixture
def publishing(store: Store) -> Publishing:
    """A and B served, then V4, which the stage promoted before it died; its own artifact was not committed."""
    made = Publishing(store)
    promote(store, A, B)
    made.judged(V4, KEY, B)
    assert made.run(KEY)["model"]["version"] == V4
    return made


def test_a_stage_never_promotes_again_what_was_rolled_back(store: Store, publishing: Publishing) -> None:
    promotion.roll_back(store, "m", "complaints")
    reason = publishing.held(KEY)
    assert reason.startswith("it served and was rolled back on") and "(complaints)" in reason
    promotion.promote(store, "m", V4, by="promote", reason="it was the page")
    assert publishing.run(KEY)["gate"]["verdict"] == "PASS"


def test_a_stage_never_promotes_a_training_that_was_rolled_back_as_another_version(
    store: Store, publishing: Publishing
) -> None:
    """After a second step back another version serves, so the stage has another key and writes another version."""
    promotion.roll_back(store, "m", "complaints")
    promotion.roll_back(store, "m", "more complaints")
    publishing.judged(V5, OTHER_KEY, A)
    assert f"{V4}, of the same training, served and was rolled back on" in publishing.held(OTHER_KEY)
    promotion.promote(store, "m", V4, by="promote", reason="it was the page")
    promote(store, A)  # a stage judged something else and let it serve: nobody took V4 back
    assert promotion.withdrawal(store, promotion.read_current(store, "m"), V5, promotion.Training("t")) is None


def test_a_training_stays_rolled_back_when_its_version_was_removed(store: Store, publishing: Publishing) -> None:
    promotion.roll_back(store, "m")
    promotion.roll_back(store, "m")
    shutil.rmtree(store.full(f"models/m/{V4}"))
    publishing.judged(V5, OTHER_KEY, A)
    assert "of the same training" in publishing.held(OTHER_KEY)


def test_a_log_of_an_earlier_release_does_not_name_trainings(store: Store, publishing: Publishing) -> None:
    promotion.roll_back(store, "m")
    promotion.roll_back(store, "m")
    record = store.read_json("models/m/current.json")
    for entry in record["log"]:
        entry.pop("training", None)
    store.write_json("models/m/current.json", record)
    publishing.judged(V5, OTHER_KEY, A)
    assert "of the same training" in publishing.held(OTHER_KEY)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("forced", ["", ".2"])
def test_a_training_stays_rolled_back_under_another_plan(
    store: Store, removed: bool, earlier: bool, forced: str
) -> None:
    """The machine was measured again, so that plan and training have other keys, and the checkpoints are the same."""
    promote(store, A, B)
    plain(store, V4, train="t", checkpoint="runs/x/checkpoints/0123456789/step-00000012")
    promote(store, V4)
    promotion.roll_back(store, "m", "complaints")
    if earlier:
        record = store.read_json("models/m/current.json")
        for entry in record["log"]:
            entry.pop("weights", None)
        store.write_json("models/m/current.json", record)
    if removed:
        shutil.rmtree(store.full(f"models/m/{V4}"))
    current = promotion.read_current(store, "m")
    again = plain(store, V5, train="u", checkpoint=f"runs/y/checkpoints/0123456789{forced}/step-00000012")
    undone = promotion.withdrawal(store, current, V5, promotion.Training.of(again))
    assert (undone is not None) is not (removed and earlier), "an earlier release kept the key of the plan alone"
    listed = {each.version: each.withdrawn for each in model_commands.list_versions(store, "m").versions}
    assert listed[A] is listed[B] is None and (listed[V5] is None) is (undone is None)
    if undone:
        assert f"{V4}, of the same training, served and was rolled back on" in str(listed[V5])
        assert removed or str(listed[V4]).startswith("it served and was rolled back on")
        assert str(listed[V5]) in listing([model_commands.list_versions(store, "m")])
    longer = promotion.Training("u", "0123456789/step-00000024")
    assert promotion.withdrawal(store, current, V5, longer) is None, "trained on"


def test_a_version_that_was_rolled_back_is_shown_as_withdrawn_before_the_verdict_of_its_card(store: Store) -> None:
    promote(store, A)
    lineage = Lineage(run="r", checkpoint="c", training="t", evaluation="e", partition="p")
    plan = CardPlan(path="plans/k", hardware="laptop")
    verdict = Verdict(verdict="PASS", reasons=("NE is low",))
    card = ModelCard(model="m", version=V4, created=0.0, gate=verdict, plan=plan, lineage=lineage)
    plain(store, V4, train="t", files={"card.json": json.dumps(card.to_json()).encode()})
    promote(store, V4)
    serving = details(model_commands.show(store, "m", V4)).splitlines()
    assert serving[0] == f"m {V4} (serves)" and "withdrawn" not in "".join(serving)
    promotion.roll_back(store, "m", "complaints")
    title, _, _, withdrawn, gate, reason, *_ = details(model_commands.show(store, "m", V4)).splitlines()
    assert title == f"m {V4} (withdrawn)"
    assert withdrawn.startswith("  withdrawn: it served and was rolled back on ")
    assert withdrawn.endswith(" (complaints)") and (gate, reason) == ("  gate PASS", "    NE is low")
    promotion.promote(store, "m", V4, by="promote", reason="it was right")
    assert details(model_commands.show(store, "m", V4)).startswith(f"m {V4} (serves)\n")


@pytest.mark.parametrize("removed", [False, True])
def test_the_same_model_stays_rolled_back_whatever_made_it(store: Store, removed: bool) -> None:
    """A setting that changes no weight has other keys of training and checkpoints."""
    promote(store, A, B)
    files = {"dense.safetensors": b"1", "dense.json": b"1"}
    plain(store, V4, train="t", checkpoint="runs/x/checkpoints/0123456789/step-00000012", files=files)
    promote(store, V4)
    promotion.roll_back(store, "m", "complaints")
    if removed:
        shutil.rmtree(store.full(f"models/m/{V4}"))
    other = "runs/y/checkpoints/abcdefabcd/step-00000012"
    again = plain(store, V5, train="u", checkpoint=other, files={**files, "dense.json": b"2"})
    better = plain(store, "v00006-eeeeeeee", train="u", checkpoint=other, files={"dense.safetensors": b"2"})
    current = promotion.read_current(store, "m")
    assert promotion.withdrawal(store, current, V5, promotion.Training.of(again)) is not None
    assert promotion.withdrawal(store, current, "v00006-eeeeeeee", promotion.Training.of(better)) is None


def test_serving_an_earlier_version_by_hand_is_going_back(store: Store, publishing: Publishing) -> None:
    promotion.promote(store, "m", B, by="promote", reason="v4 is wrong")
    assert f"it served and was replaced by {B} on" in publishing.held(KEY)


def test_serving_a_later_version_by_hand_is_not_going_back(store: Store, publishing: Publishing) -> None:
    plain(store, V5)
    promotion.promote(store, "m", V5, by="promote", reason="held for PSI")
    assert promotion.withdrawal(store, promotion.read_current(store, "m"), V4, promotion.Training("t")) is None


def test_a_rollback_while_the_report_is_written_is_kept(store: Store, publishing: Publishing, monkeypatch) -> None:
    """After the stage has looked at what serves, and before it locks the model."""
    real, between = release.write_report, iter([lambda: promotion.roll_back(store, "m", "complaints")])

    def write_report(*given) -> None:
        for act in between:
            act()
        real(*given)

    monkeypatch.setattr(release, "write_report", write_report)
    summary = publishing.run(KEY)
    assert summary["gate"]["verdict"] == "HOLD" and "(complaints)" in summary["gate"]["reasons"][0]
    assert promotion.read_current(store, "m").line == (A, B)


def test_two_writers_at_once_is_a_message(store: Store) -> None:
    promote(store, A)
    with (
        versions.model_lock(store, "m"),
        pytest.raises(LaunchError, match="is already being changed: another process holds"),
    ):
        promote(store, B)


def _promote_without_end(url: str, names: Sequence[str], told: Connection) -> None:
    store = Store(url)
    while True:
        for name in names:
            promotion.promote(store, "m", name, by="publish")
            told.send(name)


def test_kill_9_at_any_moment_leaves_a_version_that_is_whole(store: Store) -> None:
    """A process promotes without end and is killed after a few promotions, in the midst of the next one."""
    promote(store, A)
    context = multiprocessing.get_context("forkserver")
    for killed_after in (1, 2, 5, 11, 23):
        heard, told = context.Pipe(duplex=False)
        process = context.Process(target=_promote_without_end, args=(store.url, (A, B, C), told))
        process.start()
        told.close()  # or a process that ends by itself would be waited for
        try:
            for _ in range(killed_after):
                assert heard.poll(PATIENCE) and heard.recv() in (A, B, C)
        finally:
            process.kill()
            process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        record = json.loads(Path(store.full("models/m/current.json")).read_text())
        assert record["version"] in (A, B, C) and record["version"] == record["line"][-1]
        assert promotion.incumbent(store, "m") is not None
    assert promotion.roll_back(store, "m").version in (A, B, C)


def test_a_rollback_reads_nothing_of_the_tables_however_large_they_are(store: Store, monkeypatch) -> None:
    """So it takes well under a second for any model."""
    with store.draft(f"models/m/{D}", kind="model", key="k" * 32, config={}, inputs={}) as draft:
        for name in ("serving.json", "tables/a.rows", "tables/b.rows"):
            with draft.open(name) as sink:
                sink.write(b"0123456789")
        draft.commit({"verdict": "PASS"})
    promote(store, D, A)
    opened = []

    def record(name: str) -> None:
        real = getattr(store.fs, name)

        def call(path, *given, **named):
            opened.append(path)
            return real(path, *given, **named)

        monkeypatch.setattr(store.fs, name, call)

    for name in ("open", "cat_file", "cat", "get_file"):
        record(name)
    assert promotion.roll_back(store, "m").version == D
    read = {path.rpartition(f"{D}/")[2] for path in opened if f"/{D}/" in path}
    assert "serving.json" in read and not any(name.startswith("tables/") for name in read)
    opened.clear()
    assert promotion.promote(store, "m", A, by="promote").version == A
    assert promotion.promote(store, "m", D, by="promote").version == D
    assert any(f"/{D}/tables/" in path for path in opened)
