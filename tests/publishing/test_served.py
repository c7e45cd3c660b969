"""A version scores as the model it was made of: with fp32 tables to the bit for the same batch, else within a bound."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from torch.nn import functional

from pipeline.config import DenseFeature, HardwareConfig
from pipeline.config.compose import to_yaml
from pipeline.core.errors import ArtifactError
from pipeline.evaluation.gate.measure import units_in_the_last_place
from pipeline.publishing.dense import CONFIG, write_dense
from pipeline.publishing.program import PROGRAM, read_program, write_program
from pipeline.publishing.served import NEEDED, SERVING, ServedModel, local_version
from pipeline.records import DENSE, WEIGHTS, Tower, TowerModuleSpec, Towers
from pipeline.serving.scorer import version_settings
from pipeline.store import Store
from tests.checkpoint import built
from tests.publishing import made


@torch.no_grad()
def expected(dense, ids) -> np.ndarray:
    """What the tables and the ranking model give, by plain torch."""
    tables, parts = made.tables(), []
    for name, each in ids.items():
        if name == "b/c":
            offsets, weights = torch.from_numpy(each.offsets[:-1]), torch.from_numpy(each.weights)
            values = torch.from_numpy(each.values).long()
            parts.append(
                functional.embedding_bag(values, tables[name], offsets, mode="sum", per_sample_weights=weights)
            )
        else:
            parts.append(tables[name][torch.from_numpy(each).long()])
    return made.dense_part()(torch.from_numpy(dense), torch.stack(parts, dim=1)).numpy()


def served(folder: Path, coding: str, memory: int = 1 << 30) -> ServedModel:
    store = Store(str(folder / "store"))
    return ServedModel(Path(store.full(made.write_version(store, coding))), memory)


@pytest.mark.parametrize("memory", [1 << 30, 2000])
def test_with_fp32_tables_scores_are_the_same_bits(tmp_path: Path, memory: int) -> None:
    dense, ids = made.rows(500)
    assert (served(tmp_path, "fp32", memory).score(dense, ids) == expected(dense, ids)).all()


@pytest.mark.parametrize(("coding", "limit"), [("8", 0.01), ("4", 0.15), ("fp16", 0.001)])
def test_with_fewer_bits_scores_agree_within_the_codings_error(tmp_path: Path, coding: str, limit: float) -> None:
    dense, ids = made.rows(500)
    gap = np.abs(served(tmp_path, coding).score(dense, ids) - expected(dense, ids))
    assert 0 < gap.max() < limit


@pytest.mark.parametrize("threads", [2, *(pytest.param(threads, marks=pytest.mark.slow) for threads in (1, 4))])
def test_any_batch_shape_and_any_threads_score_within_the_promised_units(tmp_path: Path, monkeypatch, threads) -> None:
    """What docs/publishing.md promises of fp32 tables; half as many bits break it, so the bound tells faults."""
    dense, ids = made.rows(500)
    known, before = expected(dense, ids), torch.get_num_threads()
    exact, coarse = served(tmp_path / "exact", "fp32"), served(tmp_path / "coarse", "fp16")
    torch.set_num_threads(threads)
    try:
        for rows in (1, 7, 64, 500):
            monkeypatch.setattr("pipeline.publishing.served.SCORE_ROWS", rows)
            assert units_in_the_last_place(known, exact.score(dense, ids)) <= made.MOST_ULPS, rows
            assert units_in_the_last_place(known, coarse.score(dense, ids)) > 2 * made.MOST_ULPS, rows
    finally:
        torch.set_num_threads(before)


def test_rows_are_scored_alike_one_by_one_and_many_at_once(tmp_path: Path, monkeypatch) -> None:
    dense, ids = made.rows(40)
    model = served(tmp_path, "8", 3000)
    whole = model.score(dense, ids)
    monkeypatch.setattr("pipeline.publishing.served.SCORE_ROWS", 1)
    assert units_in_the_last_place(whole, model.score(dense, ids)) <= made.MOST_ULPS
    assert model.cache_figures()["hits"] > 0
    assert model.score(dense[:0], {name: each[:0] if name != "b/c" else each for name, each in ids.items()}).shape == (
        0,
    )


@pytest.mark.parametrize("module", ["pass_through", "dlrm", "dcn"])
def test_towers_are_part_of_the_program(module: str, tmp_path: Path) -> None:
    """The dense part of a model with towers: outputs come in the order training gave them."""
    from pipeline.models.build import build_model
    from pipeline.publishing.dense import build_member
    from pipeline.towers.modules import build_tower

    spec = TowerModuleSpec(name=module, c=1, p=0, dim=4 if module != "pass_through" else 0)
    towers = Towers(
        partition="dmt",
        module=spec,
        towers=(Tower(features=("long",), hosts=(0,)), Tower(features=("b/c", "a"), hosts=(0,))),
    )
    modules = [build_tower(spec, count, built.DIM, 5, number) for number, count in ((0, 1), (1, 2))]
    weights = {f"towers.tower.{n}.{k}": v for n, m in enumerate(modules) for k, v in m.state_dict().items()}
    dim = modules[0].dim
    ranking = build_model(made.MODEL, made.inputs(9, dim))
    weights |= {f"head.ranking.{k}": v for k, v in ranking.state_dict().items()}
    part = build_member(made.SCHEMA, towers, weights, **made.groups(made.config()))
    dense, embeddings = torch.randn(6, 2), torch.randn(6, 3, built.DIM)
    with torch.no_grad():
        a, bc, long = embeddings[:, :1], embeddings[:, 1:2], embeddings[:, 2:]
        second = modules[1](torch.cat([bc, a], 1))
        wanted = ranking(dense, torch.cat([second[:, 1:], second[:, :1], modules[0](long)], 1))
        assert torch.equal(part(dense, embeddings), wanted)
        program = made.archived(tmp_path, part, 2, (3, built.DIM))
        torch.testing.assert_close(program(dense, embeddings), wanted)
        del weights["head.ranking.head.bias"]
    with pytest.raises(ArtifactError, match="does not fit the model"):
        build_member(made.SCHEMA, towers, weights, **made.groups(made.config()))


def test_max_normalisation_is_part_of_the_program(tmp_path: Path) -> None:
    """What training normalises in the model, missing values (NaN) among it, the exported program does too."""
    from pipeline.publishing.dense import build_member

    dense = {"x": DenseFeature(transform="max_norm"), "y": DenseFeature()}
    settings = made.config()
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, dense=dense))
    plain = made.dense_part()
    weights = {f"head.ranking.{name}": value for name, value in plain.ranking.state_dict().items()}
    weights |= {"head.normalise.largest": torch.tensor([4.0]), "head.normalise.bias": torch.tensor([0.5])}
    flat = Towers(partition="flat", towers=(Tower(features=tuple(built.ROWS), hosts=(0,)),))
    store = Store(str(tmp_path))
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        write_program(draft, build_member(made.SCHEMA, flat, weights, **made.groups(settings)), 2, (3, built.DIM))
        draft.commit({})
    values = torch.tensor([[2.0, 0.3], [float("nan"), 0.3], [0.0, -1.0]])
    normalised = torch.tensor([[1.0, 0.3], [0.0, 0.3], [0.5, -1.0]])
    embeddings = torch.randn(3, 3, built.DIM)
    with torch.no_grad():
        scores = read_program(Path(store.full(f"v/{PROGRAM}")))(values, embeddings)
        assert torch.equal(scores, plain(normalised, embeddings))


def test_a_program_that_could_run_code_is_refused(tmp_path: Path) -> None:
    program = torch.export.export(made.dense_part(), (torch.zeros(3, 2), torch.zeros(3, 3, built.DIM)))
    path = tmp_path / PROGRAM
    torch.export.save(program, path)  # with its example inputs, which torch pickles
    with pytest.raises(ArtifactError, match="a pickled object .* which could run code when opened"):
        read_program(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ArtifactError, match="is not an exported program"):
        read_program(path)


def archive_in(folder: Path) -> Path:
    """An archive as ``made.write_version`` puts it beside the tables."""
    (folder / PROGRAM).write_bytes(made.archive())
    return folder / PROGRAM


def changed(path: Path, edit: Callable[[str, bytes], bytes], **more: bytes) -> Path:
    """Change entries of the archive at ``path``, and add ``more``."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**entries, **more}.items():
            archive.writestr(name, edit(name.partition("/")[2], data))
    return path


def in_model(then: str, now: str) -> Callable[[str, bytes], bytes]:
    def edit(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        assert then.encode() in data
        return data.replace(then.encode(), now.encode())

    return edit


def same(name: str, data: bytes) -> bytes:
    return data


def in_signature(key: str, value: Any) -> Callable[[str, bytes], bytes]:
    """What the program says of how it is called, ``key`` of it replaced by ``value``."""

    def edit(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        model = json.loads(data)
        calls = [call for call in model["graph_module"]["module_call_graph"] if call.get("signature")]
        assert calls
        for call in calls:
            assert key in call["signature"]
            call["signature"][key] = value
        return json.dumps(model).encode()

    return edit


def tree(context: Any, kind: str = "builtins.tuple") -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


LIBRARY = json.dumps({"__enum__": True, "fqn": "ctypes:cdll", "name": "/tmp/evil.so"})
IMPORTED = {"default_factory_module": "antigravity", "default_factory_name": "fly", "dict_context": []}
RELU = "torch.ops.aten.relu.default"


def test_an_archive_of_an_earlier_release_gives_its_program_and_nothing_else(tmp_path: Path) -> None:
    ran, program = tmp_path / "ran", archive_in(tmp_path)
    dense, embeddings = torch.randn(4, 2), torch.randn(4, 3, built.DIM)
    with torch.no_grad():
        wanted = made.dense_part()(dense, embeddings)
        assert torch.equal(read_program(program)(dense, embeddings), wanted)
        code = f"__import__('pathlib').Path('{ran}').touch()"
        changed(program, in_model('"guards_code": [', f'"guards_code": ["{code}", '))
        assert torch.equal(read_program(program)(dense, embeddings), wanted)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("edit", "more", "words"),
    [
        (in_model("Symbol('", "__import__('os').system('touch RAN') or Symbol('"), {}, "expression"),
        (same, {"archive/data/aotinductor/model/model.so": b"ELF"}, "entry"),
        (same, {"archive/data/sample_inputs/model.pt": b"pickle"}, "a pickled object"),
        (same, {"archive/serialized_exported_program.json": b"{}"}, "entry"),
        (lambda name, data: b"pt1" if name == "archive_format" else data, {}, "format"),
        (in_model(RELU, "torch.hub.load"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.from_file.default"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.resize_.default"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.set_.source_Tensor"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.relu.out"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.as_strided.default"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten._unsafe_index.Tensor"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.__class__.mro"), {}, "operator"),
        (in_model(RELU, "torch.ops.aten.no_such.default"), {}, "operator"),
        (in_signature("in_spec", tree(LIBRARY)), {}, "a tree of other things"),
        (in_signature("out_spec", tree(LIBRARY, "builtins.dict")), {}, "a tree of other things"),
        (in_signature("in_spec", tree(IMPORTED, "collections.defaultdict")), {}, "a tree of other things"),
        (in_signature("in_spec", tree("null", "torch.Size")), {}, "a tree of other things"),
        (in_signature("forward_arg_names", ["dense=print(1)", "embeddings"]), {}, "forward_arg_names"),
        (in_model('"relu"', '"x = print(1)"'), {}, "name"),
        (in_model('"torch_version": "', '"torch_version": "\\u0000'), {}, "torch_version"),
        (in_model('"opset_version": {', '"opset_version": {"a b": 1, '), {}, "key"),
        (in_model('"schema_version": {', '"later": "code", "schema_version": {'), {}, "later"),
        (in_model('"as_tensor"', '"as_custom_obj"'), {}, "an object of a class"),
        (lambda name, data: data.replace(b'"use_pickle": false', b'"use_pickle": true'), {}, "pickled tensors"),
    ],
)
def test_an_archive_with_more_than_data_is_refused_before_torch_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any, more: dict[str, bytes], words: str
) -> None:
    program = archive_in(tmp_path)
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("torch has opened it"))
    with pytest.raises(ArtifactError, match=f"holds {words}.* which could run code when opened"):
        read_program(changed(program, edit, **more))


def test_an_archive_that_is_cut_off_is_an_error_that_says_so(tmp_path: Path) -> None:
    program = archive_in(tmp_path)
    whole = program.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        program.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="is not an exported program"):
            read_program(program)


WEIGHTS_CONFIG = "data/weights/model_weights_config.json"


@pytest.mark.parametrize(
    ("entry", "data"),
    [("models/model.json", b"[]"), ("models/model.json", b"{"), (WEIGHTS_CONFIG, b"{}"), (WEIGHTS_CONFIG, b"[1]")],
)
def test_an_archive_whose_entries_are_nonsense_is_an_error_that_says_so(
    tmp_path: Path, entry: str, data: bytes
) -> None:
    program = archive_in(tmp_path)
    with pytest.raises(ArtifactError, match="is not an exported program"):
        read_program(changed(program, lambda name, was: data if name == entry else was))


class Scaled(torch.nn.Module):
    """Parameters with the names of features, which may be anything but a path."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterDict({name: torch.full((1,), 2.0 + at) for at, name in enumerate(names)})

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        scale = torch.cat([scale for _, scale in self.scales.items()]).sum()
        return scale * dense.sum(1) + embeddings.sum((1, 2))


def test_parameters_of_an_archive_may_have_the_names_of_any_features(tmp_path: Path) -> None:
    module = Scaled("price[usd]", "Größe in €", "a-b: c")
    dense, embeddings = torch.randn(4, 2), torch.randn(4, 3, built.DIM)
    with torch.no_grad():
        program = made.archived(tmp_path, module, 2, (3, built.DIM))
        assert torch.equal(program(dense, embeddings), module(dense, embeddings))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.5], ids=["gone", "cut"])
def test_an_archive_with_an_entry_that_is_cut_off_is_read_or_refused(tmp_path: Path, kept: float) -> None:
    program = archive_in(tmp_path)
    with zipfile.ZipFile(program) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for damaged in entries:
        with zipfile.ZipFile(program, "w") as archive:
            for name, data in entries.items():
                if name != damaged or kept:
                    archive.writestr(name, data[: int(len(data) * kept)] if name == damaged else data)
        with contextlib.suppress(ArtifactError):  # some entries are for other readers only
            read_program(program)


def give_settings_and_weights(store: Store, folder: Path) -> None:
    """Write into the version in ``folder`` what its dense part is built from, which earlier releases did not have."""
    weights = {f"head.ranking.{name}": value for name, value in made.dense_part().ranking.state_dict().items()}
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        write_dense(draft, made.SCHEMA, made.FLAT, [weights], [1.0])
        with draft.open(CONFIG) as sink:
            sink.write(to_yaml(dataclasses.replace(made.config(), hardware=HardwareConfig(name="t"))).encode())
        draft.commit({})
    for name in (DENSE, WEIGHTS, CONFIG):
        shutil.copy(store.full(f"v/{name}"), folder / name)


def test_a_version_is_built_from_settings_and_weights_and_its_program_stays_closed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_version(store, "fp32")))
    dense, ids = made.rows(20)
    wanted = ServedModel(folder, 1 << 20).score(dense, ids)
    give_settings_and_weights(store, folder)
    (folder / PROGRAM).write_bytes(b"anything")
    assert (ServedModel(folder, 1 << 20).score(dense, ids) == wanted).all()
    (folder / WEIGHTS).write_bytes(b"anything")
    with pytest.raises(ArtifactError, match="the dense part of .* cannot be read"):
        ServedModel(folder, 1 << 20)


def test_a_machine_without_the_memory_for_a_version_does_not_blame_its_code(tmp_path: Path, monkeypatch) -> None:
    store = Store(str(tmp_path))
    folder = Path(store.full(made.write_version(store, "fp32")))
    give_settings_and_weights(store, folder)
    monkeypatch.setattr("pipeline.publishing.dense.build_dense", lambda *_: torch.empty(1 << 50))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        ServedModel(folder, 1 << 20)


def test_nothing_of_a_version_is_pickled_or_names_a_file_of_this_machine(tmp_path: Path) -> None:
    """So the same model has the same bytes wherever it is published."""
    store = Store(str(tmp_path / "store"))
    with zipfile.ZipFile(store.full(f"{made.write_version(store, '8')}/{PROGRAM}")) as archive:
        assert not [entry.filename for entry in archive.infolist() if entry.file_size and ".pt" in entry.filename]
        assert not [name for name in archive.namelist() if b".py" in archive.read(name)]


def test_a_version_in_an_object_store_is_fetched_for_the_while(tmp_path: Path) -> None:
    store = Store("memory://versions")
    path = made.write_version(store, "fp32")
    dense, ids = made.rows(20)
    with local_version(store, path) as folder:
        assert (ServedModel(folder, 1000).score(dense, ids) == expected(dense, ids)).all()
    assert not folder.exists()


@pytest.mark.parametrize("name", [SERVING, DENSE])
def test_a_record_that_is_nested_too_deep_is_damaged(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path))
    folder = tmp_path / made.write_built(store)
    (folder / name).write_text("[" * 200_000)
    with pytest.raises(ArtifactError):
        ServedModel(folder, 1000)
    with pytest.raises(ArtifactError, match="is not valid JSON"):
        store.read_json(f"{folder.relative_to(tmp_path)}/{name}")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"5", b"[]", b"train: {lrr: 1}", b"a: " + b"[" * 5000])
def test_settings_of_a_version_that_are_none_are_an_error_of_the_version(tmp_path: Path, text: bytes) -> None:
    store = Store(str(tmp_path))
    path = made.write_built(store)
    (tmp_path / path / CONFIG).write_bytes(text)
    with pytest.raises(ArtifactError, match="is no configuration"):
        version_settings(store, path)


@pytest.mark.parametrize("name", ["tables/../../../../../{out}", "./../{out}", "tables//{out}", "..\\{out}"])
@pytest.mark.parametrize("needed", [("",), NEEDED])
def test_a_key_that_leads_out_of_a_version_is_written_nowhere(tmp_path: Path, name: str, needed: Sequence[str]) -> None:
    """Keys of an object store may hold ``..``; as paths of this machine they would lead anywhere."""
    store = Store(f"memory://{tmp_path.name}")
    path = made.write_version(store, "fp32")
    out = tmp_path / "owned.txt"
    key = f"{store.full(path)}/{name.format(out=str(out).lstrip('/'))}"
    store.fs.store[key] = MemoryFile(store.fs, key, b"owned")
    if needed == ("",) or name.startswith("tables"):
        with pytest.raises(ArtifactError, match="leads out of its folder"), local_version(store, path, needed):
            pass
    else:
        with local_version(store, path, needed) as folder:
            assert sorted(each.name for each in folder.rglob("*") if "owned" in each.name) == []
    assert not out.exists()


def test_a_description_of_another_format_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    folder = Path(store.full(made.write_version(store, "8")))
    (folder / SERVING).write_text('{"format": "other"}')
    with pytest.raises(ArtifactError, match="has format other, expected nightjar-model-1"):
        ServedModel(folder, 0)


def test_serving_needs_neither_torchrec_nor_fbgemm(root: Path) -> None:
    code = (
        "import sys, pipeline.serving.prediction, pipeline.publishing.served; "
        "print([m for m in ('torchrec', 'fbgemm_gpu') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
