"""``nightjar ckpt`` on damaged, read-only and unknown things: what it says, and that it leaves nothing wrong behind."""

import os
import subprocess

import pytest

from pipeline.checkpoint.reference import find_checkpoint
from pipeline.cli import main
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.store import Store
from tests.checkpoint.built import CODINGS, DIRECTORY, put, quantised_chain
from tests.checkpoint.test_commands import ckpt, ckpt_json
from tests.servers import refusing


@pytest.fixture
def store(tmp_path):
    return quantised_chain(tmp_path)


def flip(store, path):
    """Change one bit in the middle of a file."""
    with store.open(path) as source:
        data = bytearray(source.read())
    data[len(data) // 2] ^= 1
    store.write_bytes(path, bytes(data))


@pytest.mark.parametrize("file_format", ["parquet", "safetensors"])
def test_export_of_a_damaged_checkpoint_leaves_no_file_of_the_damaged_table(store, capsys, tmp_path, file_format):
    out = tmp_path / "out"
    arguments = ("export", "r", "--out", str(out), "--format", file_format, "--table", "a")
    ckpt(store, capsys, *arguments)
    before = (out / f"a.{file_format}").read_bytes()
    folder = f"{DIRECTORY}/step-00000003/rows/a"
    flip(store, f"{folder}/{store.names(folder)[0]}")
    assert "is corrupt" in ckpt(store, capsys, *arguments, code=7).err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {f"a.{file_format}": before}


def test_an_empty_url_is_refused(store, capsys):
    assert "--out is empty" in ckpt(store, capsys, "export", "r", "--out", "", code=2).err
    assert main(["ckpt", "ls", "--store", " "]) == 2
    assert "--store is empty" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="store is empty"):
        Store("")


def test_a_file_is_no_store(store, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["ckpt", "ls", "--store", str(tmp_path / "file")]) == 2
    assert f"there is no store at {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_store_that_does_not_answer_is_no_fault_of_nightjar(capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with refusing() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for command in (["ckpt", "ls", "--store", "s3://b/s"], ["run", "run=r", "stages=[ingest]", "store=s3://b/s"]):
            assert main(command) == 8
            said = capsys.readouterr().err
            assert "s3://b/s cannot be read: " in said
            assert "Traceback" not in said


def test_a_checkpoint_that_lost_its_manifest_is_not_listed_as_one_there_is(store, capsys):
    path = f"{DIRECTORY}/step-00000003"
    store.fs.rm_file(store.full(f"{path}/manifest.json"))
    said = ckpt(store, capsys, "verify", "r/step-00000003", code=7).err
    assert f"{path} has no manifest.json" in said
    assert said.split("available: ")[1].splitlines()[0] == "r/step-00000001, r/step-00000002"


def test_export_takes_a_table_once_and_a_layout_for_parquet_only(store, capsys, tmp_path):
    arguments = ("export", "r", "--out", str(tmp_path / "out"), "--table", "a")
    assert [each["table"] for each in ckpt_json(store, capsys, *arguments, "--table", "a")["files"]] == ["a"]
    said = ckpt(store, capsys, *arguments, "--format", "safetensors", "--layout", "list", code=2).err
    assert "--layout list needs Parquet files" in said


def spoil(store, step):
    """Change a digit in the manifest of a checkpoint; the manifest's path."""
    path = f"{DIRECTORY}/step-{step:08d}/manifest.json"
    with store.open(path) as source:
        data = source.read()
    store.write_bytes(path, data.replace(b'"samples": %d' % (10 * step), b'"samples": 77'))
    return path


@pytest.mark.parametrize(
    "command", [("show", "r"), ("export", "r", "--out", "o"), ("compact", "r"), ("diff", "r/step-00000002", "r")]
)
def test_a_damaged_manifest_is_never_passed_over_silently(store, capsys, command):
    path = spoil(store, 3)
    said = ckpt(store, capsys, *command, code=7).err
    assert f"checkpoint {DIRECTORY}/step-00000003 cannot be used: its manifest.json is not a manifest" in said
    assert f"hint: {DIRECTORY}/step-00000002 takes the newest intact one" in said
    assert f"nightjar ckpt verify {path.removesuffix('/manifest.json')} --store {store.url} lists all damage" in said
    assert "force=true" not in said
    ckpt(store, capsys, "show", f"{DIRECTORY}/step-00000002")


def test_to_start_from_a_run_whose_newest_manifest_is_damaged_takes_the_exact_name_of_an_older_one(store):
    spoil(store, 3)
    with pytest.raises(ArtifactError, match="step-00000003 cannot be used") as caught:
        find_checkpoint(store, "r", option="checkpoint.init_from=")
    override = caught.value.hint.split(" ")[0]
    assert override == f"checkpoint.init_from={DIRECTORY}/step-00000002"
    assert compose([override]).checkpoint.init_from == f"{DIRECTORY}/step-00000002"
    assert find_checkpoint(store, override.partition("=")[2]).summary["step"] == 2
    assert find_checkpoint(store, "r", "k" * 32, 2).summary["step"] == 2  # as a run that goes on asks
    spoil(store, 2)
    put(store, 4, [1], 0.2, CODINGS["q4"])
    assert find_checkpoint(store, "r").summary["step"] == 4  # those damaged are older


def test_a_damaged_manifest_of_another_training_of_the_run_may_be_the_newest(store):
    put(store, 9, directory="runs/r/checkpoints/9876543210")
    spoil(store, 3)
    with pytest.raises(ArtifactError, match="step-00000003 cannot be used"):
        find_checkpoint(store, "r")


def test_ls_and_gc_show_a_damaged_checkpoint_and_keep_it(store, capsys):
    path = spoil(store, 2)
    listed = ckpt_json(store, capsys, "ls", code=7)
    assert [(each["step"], each["type"]) for each in listed] == [(1, "baseline"), (2, "damaged"), (3, "difference")]
    assert listed[1]["problem"].startswith("manifest.json is not a manifest")
    text = ckpt(store, capsys, "ls", "r", code=7).out
    assert f"damaged: {path} is not a manifest of schema version 2" in text
    result = ckpt_json(store, capsys, "gc", "--keep-last", "1", "--min-age", "0")
    assert result["removed"] == []
    kept = {each["path"]: each["reason"] for each in result["kept"]}
    assert kept[path.removesuffix("/manifest.json")] == "its manifest.json is damaged"
    assert f"keep {path.removesuffix('/manifest.json')}  its manifest.json is damaged" in ckpt(store, capsys, "gc").out


def test_a_run_all_of_whose_manifests_are_damaged_is_not_a_run_without_checkpoints(store, capsys):
    for step in (1, 2, 3):
        spoil(store, step)
    assert [each["type"] for each in ckpt_json(store, capsys, "ls", code=7)] == ["damaged"] * 3
    result = ckpt_json(store, capsys, "verify", "r", code=7)
    assert result["checkpoint"] == f"{DIRECTORY}/step-00000003"
    assert [each["file"] for each in result["damage"]] == ["manifest.json"] * 3
    assert "r is damaged in 3 places" in ckpt(store, capsys, "verify", "r", code=7).out
    assert "step-00000003 cannot be used" in ckpt(store, capsys, "show", "r", code=7).err


def test_a_damaged_parent_is_named_with_a_command_that_can_be_typed(store, capsys):
    path = spoil(store, 1)
    said = ckpt(store, capsys, "export", "r", "--out", "o", code=7).err
    assert "step-00000003 depends on step-00000001, whose manifest.json is not a manifest" in said
    assert "force=true" not in said and "older checkpoint is used" not in said
    command = said.split("hint: nightjar ")[1].split(" lists all damage")[0]
    assert main(command.split()) == 7
    assert path in capsys.readouterr().out


def test_damage_met_while_reading_names_the_command_that_lists_all_of_it(store, capsys):
    flip(store, f"{DIRECTORY}/step-00000003/index.json")
    said = ckpt(store, capsys, "show", "r", code=7).err
    assert f"hint: nightjar ckpt verify {DIRECTORY}/step-00000003 --store {store.url} lists all damage" in said


@pytest.fixture
def read_only(store):
    """A store that refuses every write."""
    if os.geteuid():
        subprocess.run(["chmod", "-R", "a-w", store.root], check=True)
        yield store
        subprocess.run(["chmod", "-R", "u+w", store.root], check=True)
        return
    commands = [["mount", "--bind", store.root, store.root], ["mount", "-o", "remount,ro,bind", store.root]]
    if any(subprocess.run(command, capture_output=True).returncode for command in commands):
        pytest.skip("this machine lets us mount nothing")
    yield store
    subprocess.run(["umount", store.root], check=True)


def test_gc_and_compact_of_a_read_only_store_say_so(store, capsys, read_only):
    said = ckpt(store, capsys, "gc", "--keep-last", "1", code=7).err
    assert f"the store refuses removing {DIRECTORY}/step-00000002: " in said
    assert "a user who may write" in said
    assert "the store refuses writing" in (said := ckpt(store, capsys, "compact", "r", code=7).err)
    assert "hint: --store <an fsspec URL you may write to>" in said
    assert len(store.names(DIRECTORY)) == 3


def test_the_store_is_a_flag_or_an_override_and_must_exist(store, capsys):
    assert main(["ckpt", "ls", "r", f"store={store.url}"]) == 0
    assert "3 checkpoints" in capsys.readouterr().out
    assert main(["ckpt", "ls", "--store", "/nope/store"]) == 2
    said = capsys.readouterr().err
    assert "there is no store at /nope/store" in said and "--store <URL of the store>" in said
    assert main(["ckpt", "ls", "a", "b"]) == 2
    assert "nightjar ckpt ls --help" in capsys.readouterr().err
    assert main(["ckpt", "ls", "--store", "x9://a"]) == 2
    assert "hint: --store <an fsspec URL>" in capsys.readouterr().err
