"""``nightjar ckpt``: what each command returns, prints and leaves behind, through the command line itself."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from pipeline.checkpoint.export import export
from pipeline.checkpoint.retention import collect, sweep
from pipeline.cli import main
from pipeline.store import FileEntry, Store
from tests.checkpoint.built import DIM, DIRECTORY, ROWS, put, quantised_chain, restored

BAD_AGES = ("-1", "nan", "inf")
ALL_STEPS = ["step-00000001", "step-00000002", "step-00000003"]


@pytest.fixture
def store(tmp_path):
    return quantised_chain(tmp_path)


def ckpt(store, capsys, *arguments, code=0):
    assert main(["ckpt", arguments[0], "--store", store.url, *arguments[1:]]) == code
    return capsys.readouterr()


def ckpt_json(store, capsys, *arguments, code=0):
    return json.loads(ckpt(store, capsys, *arguments, "--json", code=code).out)


def test_ls_says_type_coding_size_and_what_rests_on_what(store, capsys):
    one, two, three = ckpt_json(store, capsys, "ls")
    assert [each["name"] for each in (one, two, three)] == ALL_STEPS
    assert (one["type"], one["codings"], one["rests"]) == ("baseline", ["q8"], ["step-00000002", "step-00000003"])
    assert (two["type"], two["codings"], two["parents"]) == ("difference", ["q4"], ["step-00000001"])
    assert two["bytes"] == sum(e.bytes for e in store.get(two["path"], "train").files.values())
    assert two["share"] == two["bytes"] / 100_000
    text = ckpt(store, capsys, "ls", "r").out
    assert "r/step-00000003" in text
    assert "3 checkpoints" in text
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_an_unknown_run_is_a_mistake_and_names_the_known_ones(store, capsys, command):
    assert f"no run 'x' in store {store.url}; available: r" in ckpt(store, capsys, command, "x", code=2).err


@pytest.mark.parametrize("name", ["r", "r/step-00000003", f"{DIRECTORY}/step-00000003"])
def test_a_checkpoint_has_three_names(store, capsys, name):
    shown = ckpt_json(store, capsys, "show", name)
    assert shown["path"] == f"{DIRECTORY}/step-00000003"
    assert shown["position"]["next_batch"] == 3
    assert shown["tables"]["long"]["rows"] == 900
    assert 0 < shown["tables"]["long"]["rows_stored"] < 900
    assert shown["tables"]["long"]["codings"] == ["q4"]
    assert shown["config"]["seed"] == 2026
    text = ckpt(store, capsys, "show", name).out
    assert "b/c" in text
    assert "train.lr" in text


@pytest.mark.parametrize("name", ["x", "r/step-00000009", "x/step-00000001", "runs/r/checkpoints/no/step-00000001"])
def test_an_unknown_checkpoint_names_what_there_is(store, capsys, name):
    complaint = ckpt(store, capsys, "verify", name, code=7).err
    assert f"no checkpoint {name!r}" in complaint
    assert "r/step-00000003" in complaint


def test_verify_passes_a_whole_chain(store, capsys):
    result = ckpt_json(store, capsys, "verify", "r")
    assert result["whole"]
    assert result["damage"] == []
    assert "is whole" in ckpt(store, capsys, "verify", "r").out


def test_verify_names_all_damaged_files_of_the_chain(store, capsys, tmp_path):
    base, last = (tmp_path / "store" / DIRECTORY / name for name in (ALL_STEPS[0], ALL_STEPS[2]))
    chunks = sorted(base.glob("rows/*/*")), sorted(last.glob("rows/*/*"))
    flipped, cut, gone = chunks[0][0], chunks[0][-1], chunks[1][0]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-7])
    gone.unlink()
    (last / "state.json").write_text("{")
    result = ckpt_json(store, capsys, "verify", "r", code=7)
    found = {(tmp_path / "store" / d["checkpoint"] / d["file"]): d["problem"] for d in result["damage"]}
    assert set(found) == {flipped, cut, gone, last / "state.json"}
    assert "checksum" in found[flipped]
    assert "bytes, expected" in found[cut]
    assert found[gone] == "is missing"
    text = ckpt(store, capsys, "verify", "r", code=7).out
    assert "damaged in 4 places" in text
    assert str(gone.relative_to(tmp_path / "store")) in text


def test_verify_names_a_missing_and_a_damaged_parent(store, capsys, tmp_path):
    manifest = tmp_path / "store" / DIRECTORY / "step-00000001/manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    (damage,) = ckpt_json(store, capsys, "verify", "r", code=7)["damage"]
    assert (damage["checkpoint"], damage["file"]) == (f"{DIRECTORY}/step-00000001", "manifest.json")
    manifest.unlink()
    (damage,) = ckpt_json(store, capsys, "verify", "r", code=7)["damage"]
    assert damage["problem"] == "is missing, and step-00000003 rests on it"


def test_verify_of_a_run_does_not_pass_over_a_damaged_manifest(store, capsys, tmp_path):
    manifest = tmp_path / "store" / DIRECTORY / "step-00000003/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 3', b'"step": 2'))
    result = ckpt_json(store, capsys, "verify", "r", code=7)
    (damage,) = result["damage"]
    assert (damage["checkpoint"], damage["file"]) == (f"{DIRECTORY}/step-00000003", "manifest.json")
    assert damage["problem"].startswith("is not a manifest of schema version 2")
    text = ckpt(store, capsys, "verify", "r/step-00000003", code=7).out
    assert "r/step-00000003 is damaged in 1 place (" in text
    assert f"  {DIRECTORY}/step-00000003/manifest.json is not a manifest" in text


def test_diff_counts_rows_values_and_settings(store, capsys):
    put(store, 4, [1, 3], 0.1, checkpoint={"keep_last": 7})
    a = {t: w for t, _, w, _ in restored(store, store.get(f"{DIRECTORY}/step-00000003", "train"))}
    b = {t: w for t, _, w, _ in restored(store, store.get(f"{DIRECTORY}/step-00000004", "train"))}
    result = ckpt_json(store, capsys, "diff", "r/step-00000003", "r")
    for name in ROWS:
        gap, told = (a[name] - b[name]).abs(), result["tables"][name]
        assert told["rows_changed"] == int((gap > 0).any(1).sum())
        assert told["largest"] == float(gap.max())
        assert told["mean"] == pytest.approx(float(gap.double().mean()))
    assert result["dense"]["head.bias"]["largest"] == 1.0
    assert result["config"] == {"checkpoint.keep_last": [2, 7]}
    text = ckpt(store, capsys, "diff", "r/step-00000003", "r").out
    assert "checkpoint.keep_last: 2 -> 7" in text
    same = ckpt_json(store, capsys, "diff", "r", "r")
    assert all(table["rows_changed"] == 0 for table in same["tables"].values())


def test_compact_from_the_command_line(store, capsys):
    result = ckpt_json(store, capsys, "compact", "r")
    assert result["compacted"] == ["step-00000001"]
    assert ckpt_json(store, capsys, "ls")[-1]["codings"] == ["q4", "q8"]
    assert ckpt_json(store, capsys, "verify", "r")["whole"]
    assert "already" in ckpt(store, capsys, "compact", "r").out


def test_gc_keeps_what_is_needed_and_what_a_model_names(store, capsys):
    put(store, 4, (), 1.0)
    put(store, 5, [4], 0.2, checkpoint={"keep_last": 1})
    # keep_last 1: step 5 and its baseline stay.
    listed = ckpt_json(store, capsys, "gc", "--dry-run")
    assert [each["path"][-13:] for each in listed["removed"]] == ALL_STEPS
    assert len(store.names(DIRECTORY)) == 5
    store.write_json("models/ads/v1/manifest.json", {"inputs": {"checkpoint": f"{DIRECTORY}/step-00000002"}})
    store.write_json("models/ads/deep/v2/manifest.json", {"summary": {"a": [{"b": f"{DIRECTORY}/step-00000009"}]}})
    assert [e["path"][-13:] for e in ckpt_json(store, capsys, "gc", "--dry-run")["removed"]] == ["step-00000003"]
    store.write_json("runs/r/train/k/manifest.json", {"summary": {"final": f"{DIRECTORY}/step-00000003"}})
    assert ckpt_json(store, capsys, "gc")["removed"] == []
    store.fs.rm(store.full("runs/r/train"), recursive=True)
    text = ckpt(store, capsys, "gc").out
    assert f"removed {DIRECTORY}/step-00000003" in text
    assert "named by models/ads/v1/manifest.json" in text
    assert store.names(DIRECTORY) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]


def test_gc_takes_retention_from_flags_and_removes_old_remains(store, capsys):
    store.write_bytes(f"{DIRECTORY}/step-00000009/rows/a/0.safetensors", b"x")
    put(store, 4, (), 1.0)
    put(store, 5, (), 1.0)
    arguments = ("gc", "r", "--keep-last", "1", "--keep-every", "2")
    assert [e["path"][-13:] for e in ckpt_json(store, capsys, *arguments, "--dry-run")["removed"]] == ["step-00000003"]
    result = ckpt_json(store, capsys, *arguments, "--min-age", "0")
    reasons = {each["path"][-13:]: each["reason"] for each in result["removed"]}
    assert reasons == {"step-00000003": "outside retention", "step-00000009": "never committed"}
    assert store.names(DIRECTORY) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]


def test_gc_takes_no_folder_that_a_writer_has_just_made_for_remains(store, capsys):
    made = f"{DIRECTORY}/step-00000009"
    store.fs.makedirs(store.full(f"{made}/rows/a"))
    assert ckpt_json(store, capsys, "gc")["removed"] == []
    os.utime(store.full(made), (0, 0))
    assert [each["path"] for each in ckpt_json(store, capsys, "gc")["removed"]] == [made]


def test_gc_passes_over_a_file_that_goes_while_it_looks(store, monkeypatch):
    for name in ("0", "1"):
        store.write_bytes(f"{DIRECTORY}/step-00000009/rows/a/{name}", b"x")
    find = store.fs.find

    def find_before_another_removes(path, **more):
        found = find(path, **more)
        if "step-00000009" in path:
            store.fs.rm_file(found[0])
        return found

    monkeypatch.setattr(store.fs, "find", find_before_another_removes)
    going, _ = collect(store, None, min_age_seconds=0)
    assert [(each.path[-13:], each.bytes) for each in going] == [("step-00000009", 1)]


def test_gc_keeps_a_checkpoint_committed_where_it_found_remains(store):
    store.write_bytes(f"{DIRECTORY}/step-00000009/rows/a/0", b"x")
    going, _ = collect(store, None, min_age_seconds=0)
    assert [each.path[-13:] for each in going] == ["step-00000009"]
    again = put(store, 9)
    sweep(store, going)
    store.verify(again)


def test_the_newest_of_a_run_is_that_of_the_latest_step_whatever_the_clocks_of_its_hosts_say(store, capsys):
    early = store.get(f"{DIRECTORY}/step-00000001", "train")
    store.write_manifest(dataclasses.replace(early, created=early.created + 3600))
    assert ckpt_json(store, capsys, "show", "r")["step"] == 3
    # Of two trainings of the run, the one written last counts.
    put(store, 1, directory="runs/r/checkpoints/9876543210")
    assert ckpt_json(store, capsys, "show", "r")["step"] == 3
    late = store.get("runs/r/checkpoints/9876543210/step-00000001", "train")
    store.write_manifest(dataclasses.replace(late, created=late.created + 7200))
    assert ckpt_json(store, capsys, "show", "r")["path"] == late.path


@pytest.mark.parametrize(
    "bound", [("keep-last", "-1"), ("keep-every", "0"), ("keep-every", "-2")] + [("min-age", each) for each in BAD_AGES]
)
def test_gc_refuses_bounds_that_make_no_sense(store, capsys, bound):
    flag, value = bound
    assert f"--{flag} is {value}, expected" in ckpt(store, capsys, "gc", f"--{flag}={value}", code=2).err
    assert len(store.names(DIRECTORY)) == 3


def test_gc_keeps_what_a_kept_one_rests_on_and_what_is_written_later_than_now_however_large_its_bounds(store, capsys):
    put(store, 4, (), 1.0)
    put(store, 5, (), 1.0)
    path = f"{DIRECTORY}/step-00000009/rows/a/0.safetensors"
    store.write_bytes(path, b"x")
    os.utime(store.full(path), (4e9, 4e9))
    huge = str(10**30)
    assert ckpt_json(store, capsys, "gc", "--keep-last", huge, "--keep-every", huge, "--min-age", "0")["removed"] == []
    # Every third step: a delta, whose baseline stays.
    result = ckpt_json(store, capsys, "gc", "--keep-last", "1", "--keep-every", "3", "--min-age", "0")
    assert [each["path"][-1] for each in result["removed"]] == ["2", "4"]
    assert ckpt_json(store, capsys, "verify", "r/step-00000003")["whole"]
    # The huge age of remains keeps those of all times.
    assert ckpt_json(store, capsys, "gc", "--keep-every", huge, "--min-age", "1e300")["removed"] == []


def test_gc_removes_nothing_where_a_manifest_cannot_be_read(store, capsys):
    store.write_bytes("models/ads/v1/manifest.json", b"{")
    assert "models/ads/v1/manifest.json" in ckpt(store, capsys, "gc", "--keep-last", "1", code=7).err
    assert len(store.names(DIRECTORY)) == 3
    assert "at least 1" in ckpt(store, capsys, "gc", "--keep-last", "0", code=2).err


@pytest.mark.parametrize("layout", ["columns", "list"])
def test_export_writes_rows_in_order_as_parquet(store, capsys, tmp_path, layout):
    arguments = ("export", "r", "--out", str(tmp_path / "out"), "--state", "--layout", layout)
    files = {f["table"]: f["file"] for f in ckpt_json(store, capsys, *arguments)["files"]}
    for name, _, weight, sums in restored(store, store.get(f"{DIRECTORY}/step-00000003", "train")):
        table = pq.read_table(files[name])
        assert table["row"].to_pylist() == list(range(ROWS[name]))
        columns = [table["e"].combine_chunks().flatten().to_numpy().reshape(-1, DIM)] if layout == "list" else None
        got = torch.tensor(columns[0]) if columns else torch.tensor([table[f"e{i}"].to_pylist() for i in range(DIM)]).T
        assert torch.equal(got, weight)
        assert torch.equal(torch.tensor(table["adagrad_sum"].to_pylist()), sums)


def test_export_writes_safetensors_of_one_table(store, capsys, tmp_path):
    arguments = ("export", "r", "--out", str(tmp_path / "out"), "--format", "safetensors", "--table", "b/c", "--state")
    (file,) = ckpt_json(store, capsys, *arguments)["files"]
    tensors = load_file(file["file"])
    whole = {t: (w, s) for t, _, w, s in restored(store, store.get(f"{DIRECTORY}/step-00000003", "train"))}
    assert torch.equal(tensors["weight"], whole["b/c"][0])
    assert torch.equal(tensors["adagrad_sum"], whole["b/c"][1])
    assert "no table 'x'" in ckpt(store, capsys, "export", "r", "--out", "o", "--table", "x", code=2).err


def test_two_exports_into_one_folder_do_not_mix(store, tmp_path):
    """The second one begins and ends while the first is writing: the file is that of the first, which ends last."""
    artifact, out = store.get(f"{DIRECTORY}/step-00000003", "train"), Store(str(tmp_path / "out"), "--out ")
    options = {"file_format": "safetensors", "tables": ["long"]}
    export(store, artifact, out, **options)
    whole = (tmp_path / "out/long.safetensors").read_bytes()
    begun = []

    def another(done, total):
        if not begun:
            begun.append(done)
            export(store, artifact, out, **options)

    export(store, artifact, out, **options, progress=another)
    assert begun and (tmp_path / "out/long.safetensors").read_bytes() == whole
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["long.safetensors"]


def test_an_export_follows_a_link(store, tmp_path):
    artifact, out = store.get(f"{DIRECTORY}/step-00000003", "train"), Store(str(tmp_path / "out"), "--out ")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/long.safetensors").symlink_to(tmp_path / "elsewhere")
    export(store, artifact, out, file_format="safetensors", tables=["long"])
    assert (tmp_path / "out/long.safetensors").is_symlink()
    assert load_file(tmp_path / "elsewhere")["weight"].shape == (ROWS["long"], DIM)


def test_listing_needs_no_torch(store):
    code = (
        "import sys; from pipeline.cli import main; "
        f"main(['ckpt', 'ls', '--store', {store.url!r}]); print([m for m in ('torch', 'torchrec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_step_of_nine_digits_is_named_and_pinned_by_its_whole_number(store, capsys):
    put(store, 100_000_000)
    put(store, 100_000_001)
    path = f"{DIRECTORY}/step-100000000"
    assert ckpt_json(store, capsys, "show", "r/step-100000000")["path"] == path
    store.write_json("models/m/1/manifest.json", {"inputs": {"checkpoint": path}})
    result = ckpt_json(store, capsys, "gc", "--keep-last", "1")
    assert {each["path"]: each["reason"] for each in result["kept"]}[path] == "named by models/m/1/manifest.json"
    assert store.names(DIRECTORY) == ["step-100000000", "step-100000001"]


def test_gc_removes_nothing_where_a_pinning_manifest_differs_from_its_seal(store, capsys, tmp_path):
    with store.draft("models/ads/v1", kind="model", key="k", config={}, inputs={}) as draft:
        draft.commit({"checkpoint": f"{DIRECTORY}/step-00000002"})
    put(store, 4)
    going = ckpt_json(store, capsys, "gc", "--keep-last", "1", "--dry-run")["removed"]
    assert [each["path"][-1] for each in going] == ["3"]
    manifest = tmp_path / "store/models/ads/v1/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"step-00000002", b"step-00000003"))
    assert "models/ads/v1/manifest.json" in ckpt(store, capsys, "gc", "--keep-last", "1", code=7).err
    manifest.write_bytes(b"[]")
    assert "models/ads/v1/manifest.json is not a manifest" in ckpt(store, capsys, "gc", code=7).err
    assert len(store.names(DIRECTORY)) == 4


def test_gc_keeps_a_checkpoint_that_lost_its_manifest_but_is_rested_on_or_named(store, capsys, tmp_path):
    put(store, 4)
    store.write_json("runs/r/train/k/manifest.json", {"summary": {"final": f"{DIRECTORY}/step-00000004"}})
    for step in (1, 4):
        (tmp_path / "store" / DIRECTORY / f"step-{step:08d}/manifest.json").unlink()
    result = ckpt_json(store, capsys, "gc", "--min-age", "0")
    assert result["removed"] == []
    reasons = {each["path"][-1]: each["reason"] for each in result["kept"]}
    assert "depends on it, though its manifest is gone" in reasons["1"]
    assert reasons["4"] == "named by runs/r/train/k/manifest.json, though its manifest is gone"
    assert len(store.names(DIRECTORY)) == 4


def forge(store, name, content):
    """Replace file ``name`` of step 3 and its checksum."""
    artifact = store.get(f"{DIRECTORY}/step-00000003", "train")
    store.write_bytes(f"{artifact.path}/{name}", content)
    entry = FileEntry(len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}")
    store.write_manifest(dataclasses.replace(artifact, files={**artifact.files, name: entry}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.json", b"{}"),
        ("index.json", b"[]"),
        ("index.json", b"\xff"),
        ("state.json", b"{}"),
        ("state.json", b"[]"),
        ("dense.safetensors", pickle.dumps({"a": 1})),
    ],
)
def test_content_that_is_not_a_checkpoints_is_damage_though_its_checksum_holds(store, capsys, name, content):
    forge(store, name, content)
    (damage,) = ckpt_json(store, capsys, "verify", "r", code=7)["damage"]
    assert damage["file"] == name
    assert f"{name} is not a" in damage["problem"]
    if name != "dense.safetensors":
        assert f"{name} is not a" in ckpt(store, capsys, "show", "r", code=7).err


@pytest.mark.parametrize("content", [b"", bytes(8), pickle.dumps({"a": 1})])
def test_a_chunk_that_no_restore_could_read_is_damage_though_its_checksum_holds(store, capsys, content):
    folder = f"{DIRECTORY}/step-00000003/rows/a"
    name = f"rows/a/{store.names(folder)[0]}"
    forge(store, name, content)
    (damage,) = ckpt_json(store, capsys, "verify", "r", code=7)["damage"]
    assert damage["file"] == name
    assert "is not a" in damage["problem"]


@pytest.mark.parametrize(
    "odd", [{"step": "3"}, {"type": "x"}, {"parents": None}, {"parents": ["step-00000003"]}, {"parents": ["../../x"]}]
)
def test_a_sealed_manifest_that_is_not_a_checkpoints_is_damage(store, capsys, odd):
    artifact = store.get(f"{DIRECTORY}/step-00000003", "train")
    store.write_manifest(dataclasses.replace(artifact, summary={**artifact.summary, **odd}))
    assert [each["type"] for each in ckpt_json(store, capsys, "ls", code=7)][-1] == "damaged"
    (damage,) = ckpt_json(store, capsys, "verify", "r", code=7)["damage"]
    assert "is not that of a checkpoint step-00000003" in damage["problem"]
    assert "is not that of a checkpoint" in ckpt(store, capsys, "show", "r", code=7).err
