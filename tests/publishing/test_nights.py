"""Nights, whole: raw logs to a published version that scores as training did; then one with corrupted labels."""

import contextlib
import gzip
import io
import json
import random
import shutil
import tracemalloc
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.config.compose import compose
from pipeline.core.errors import LaunchError
from pipeline.core.units import MIB
from pipeline.evaluation.metrics import sigmoid
from pipeline.ingest import parse
from pipeline.ingest.schema import CRITEO_COLUMNS
from pipeline.ingest.synthetic import write_tsv
from pipeline.ingest.values import Reject
from pipeline.models.dense_model import DenseModel
from pipeline.publishing import promotion, versions
from pipeline.publishing.served import local_version
from pipeline.records import GateRecord, read
from pipeline.serving.prediction import RejectCounter, score_file, score_sink
from pipeline.serving.scorer import Scorer
from pipeline.serving.scoring_processes import Ranks
from pipeline.store import Store
from tests.alone import alone
from tests.checkpoint import s3
from tests.commands import nightjar
from tests.ingest.test_fuzz_long import FIELDS
from tests.launch.launchers import descendants_named
from tests.publishing import made
from tests.waits import until

STAGES = "ingest,plan,partition,train,evaluate,publish"
SMALL = [
    "train.threads_per_rank=1",
    "data=criteo",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.global_batch=256",
    "train.warmup_steps=5",
    "train.precision=fp32",
    "train.lr=0.01",
    "train.schedule=linear",
    "train.decay_ratio=1",
    "data.sparse_defaults.min_count=1",
    "ingest.block_mib=1",  # several blocks
    "publish.model=clicks",
    "publish.quantise=fp32",
    "gate.slices=[C1]",
    "gate.slice_min_clicks=300",
    "evaluate.group_by=C5",
    "train.epochs=3",
    "gate.max_calibration_error=0.25",
    "gate.max_ne_increase=0.03",  # what 4,000 held-out rows can tell
    f"stages=[{STAGES}]",
    f"launch.inline=[{STAGES}]",
]
NIGHT = [*SMALL, "gate.importance_rows=500"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    """Two days of one world: mon.tsv and tue.tsv, and tue's labels mixed up in bad.tsv."""
    folder = tmp_path_factory.mktemp("logs")
    world = compose(["data.synthetic.rows=40000", "data.synthetic.ids_per_feature=60", "data.synthetic.days=1"])
    write_tsv(world.data.synthetic, world.seed, str(folder / "all.tsv"))
    lines = (folder / "all.tsv").read_text().splitlines(keepends=True)
    (folder / "mon.tsv").write_text("".join(lines[:20_000]))
    (folder / "tue.tsv").write_text("".join(lines[20_000:]))
    labels = [line[0] for line in lines[20_000:]]
    random.Random(0).shuffle(labels)
    mixed = [label + line[1:] for label, line in zip(labels, lines[20_000:], strict=True)]
    (folder / "bad.tsv").write_text("".join(mixed))
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory, logs: Path) -> Store:
    """A store with Monday's version published."""
    place = Store(str(tmp_path_factory.mktemp("store")))
    assert main(["run", *NIGHT, f"data.path={logs}/mon.tsv", "run=mon", f"store={place.url}"]) == 0
    return place


def result(store: Store, run: str) -> dict:
    return store.read_json(f"runs/{run}/result.json")


def test_the_first_night_publishes_by_absolute_questions_alone(store: Store) -> None:
    found = result(store, "mon")
    version = found["model"]["version"]
    shown = read(GateRecord, store, f"{found['stages']['publish']['artifact']}/gate.json")
    assert found["gate"] == {
        "verdict": "PASS",
        "reasons": [],
        "version": version,
        "incumbent": None,
        "warnings": [*shown.warnings],
    }
    assert found["model"] == {"name": "clicks", "version": version, "uri": f"models/clicks/{version}"}
    current = store.read_json("models/clicks/current.json")
    assert (current["version"], current["uri"]) == (version, f"models/clicks/{version}")
    manifest = store.get(f"models/clicks/{version}", "publish")
    store.verify(manifest)
    assert manifest.summary["checkpoint"].startswith("runs/mon/checkpoints/")
    names = set(manifest.files)
    assert {
        "serving.json",
        "dense.pt2",
        "transforms.json",
        "vocab/C1.parquet",
        "card.json",
        "README.md",
        "gate.json",
        "config.yaml",
        "tables/C1.rows",
    } <= names
    gate = store.read_json(f"{found['stages']['publish']['artifact']}/gate.json")
    assert {each["slice"] for each in gate["slices"]} == {"C1"}
    scores, gauc = found["eval"], gate["gauc"]
    assert (scores["group_by"], gauc["by"], gauc["limit"]) == ("C5", "C5", 0.002)
    assert (scores["gauc_groups"], scores["gauc_rows"]) == (gauc["users"], gauc["rows"])
    assert scores["gauc"] == pytest.approx(gauc["candidate"][0], abs=1e-4) and 0.5 < scores["gauc"] < scores["auc"]
    assert 0.9 < gate["coverage"]["C1"] <= 1


def test_what_is_served_scores_as_what_was_trained_within_the_last_places(store: Store) -> None:
    """fp32 tables: no held-out row's logit is off by more than docs/publishing.md promises."""
    found = result(store, "mon")
    serving = (gate := store.read_json(f"{found['stages']['publish']['artifact']}/gate.json"))["serving"]
    assert serving["ulps"] <= made.MOST_ULPS
    assert serving["largest_difference"] <= made.MOST_ULPS * 2**-23
    assert serving["trained_ne"] == found["eval"]["ne"]
    assert abs(serving["gap"]) < 1e-5
    assert gate["candidate"]["ne"][0] == pytest.approx(found["eval"]["ne"], rel=1e-5)


def test_predict_scores_raw_rows_as_training_scored_them(store: Store, logs: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "scores.parquet"
    flags = ["--store", store.url, "--out", str(out), "--cache-mib", "0.01", "--json"]
    assert main(["predict", f"{logs}/mon.tsv", *flags]) == 0
    said, scores = json.loads(capfd.readouterr().out), pl.read_parquet(out)
    assert (said["rows"], said["rows_rejected"], scores.height) == (20_000, 0, 20_000)
    assert said["cache"]["tables_on_disk"] > 0 and said["cache"]["hits"] > 0
    evaluated = result(store, "mon")["stages"]["evaluate"]["artifact"]
    with store.open(f"{evaluated}/logits.npy") as source:
        logits = np.load(source, allow_pickle=False)
    known = np.sort(sigmoid(logits))
    found = np.sort(scores["probability"].to_numpy())
    above = np.searchsorted(found, known)  # the nearest one may be the next lower one, by rounding
    beside = np.stack([found[np.clip(above + step, 0, len(found) - 1)] for step in (-1, 0)])
    assert np.abs(beside - known).min(axis=0).max() < 1e-6, "every held-out row's score is among the file's"


def scored(store: Store, path: str, folder: Path, ranks: int, *flags: str, out: str = "scores.parquet") -> dict:
    """The result of ``nightjar predict`` on so many ranks, whose files are in ``folder``."""
    folder.mkdir()
    given = [path, "--store", store.url, "--out", str(folder / out), "--rejected", str(folder / "bad"), *flags]
    with redirect_stdout(io.StringIO()) as said:
        assert main(["predict", *given, "--ranks", str(ranks), "--json"]) == 0
    return json.loads(said.getvalue())


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("tsv", (1, 2)),
        ("gz", (1, 2)),
        *(pytest.param(kind, (1, 2, 4), marks=pytest.mark.slow) for kind in ("tsv", "gz", "parquet", "jsonl")),
    ],
)
def test_predict_on_any_ranks_writes_the_same_bytes(
    store: Store, logs: Path, tmp_path: Path, kind: str, worlds: tuple[int, ...]
) -> None:
    """Rejected rows and tables on disk among them; of compressed text, too, which only one process can unpack."""
    text = (logs / "mon.tsv").read_text().splitlines(keepends=True)[: 20_000 if 4 in worlds else 12_000]
    text[3_000] = text[11_000] = "no row\n"
    path = tmp_path / f"rows.{'tsv.gz' if kind == 'gz' else kind}"
    if kind in ("tsv", "gz"):
        path.write_bytes(gzip.compress("".join(text).encode()) if kind == "gz" else "".join(text).encode())
    else:
        frame = pl.read_csv(logs / "mon.tsv", separator="\t", has_header=False, new_columns=[*CRITEO_COLUMNS])
        frame = pl.concat([frame] * 4)
        _ = frame.write_parquet(path) if kind == "parquet" else frame.write_ndjson(path)
    done = {n: scored(store, str(path), tmp_path / str(n), n, "--cache-mib", "0.01") for n in worlds}
    assert tuple(each["ranks"] for each in done.values()) == worlds
    for ranks in worlds[1:]:
        for name in ("scores.parquet", "bad"):
            assert (tmp_path / str(ranks) / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), (ranks, name)
        for figure in ("rows", "rows_rejected", "rejected", "eval"):
            assert done[ranks][figure] == done[1][figure], (ranks, figure)
        assert done[ranks]["cache"]["hits"] + done[ranks]["cache"]["misses"] > 0
    assert done[1]["rows_rejected"] == (2 if kind in ("tsv", "gz") else 0) and done[1]["eval"]["ne"] < 1


def test_predict_ends_whole_with_the_rank_that_dies(store: Store, logs: Path, tmp_path: Path) -> None:
    out, written = tmp_path / "scores.csv", []

    def write(scores: pl.DataFrame) -> None:
        written.append(scores)
        if len(written) == 2:  # the first one is written before there are ranks
            until(lambda: descendants_named("nightjar-rank"))[0].kill()

    with pytest.raises(LaunchError, match="rank . of predict was killed by signal 9") as told:
        for _ in range(20):  # the rest of the log may be through before somebody looks after the rank
            written.clear()
            with score_sink(str(out), f"{logs}/mon.tsv") as sink:
                path = f"{logs}/*.tsv"
                score_file(store, "clicks", None, path, lambda each: (sink(each), write(each)), cache_mib=1, ranks=2)
            out.unlink()
    scored = len(written)  # a number: of which rows it shows scores depends on when the rank died
    assert "--ranks 1" in told.value.hint and scored
    assert not list(tmp_path.iterdir())
    assert not descendants_named("nightjar-rank")


def test_a_rank_that_dies_after_its_last_block_is_named_too(store: Store, logs: Path) -> None:
    place = versions.version_path("clicks", promotion.read_current(store, "clicks").version)
    opening = {"path": f"{logs}/mon.tsv", "memory": MIB, "labelled": True, "ranks": 2}
    with local_version(store, place, ("",)) as folder, contextlib.ExitStack() as stack:
        scorer = Scorer(store, place, folder, **opening)
        side = stack.enter_context(Ranks(scorer, {"folder": str(folder), **opening}))
        side.start(1)
        until(lambda: side.up == 2)
        descendants_named("nightjar-rank")[0].kill()
        until(lambda: not descendants_named("nightjar-rank"))
        with pytest.raises(LaunchError, match="rank 1 of predict was killed by signal 9"):
            side.cache_figures()


def test_an_error_in_a_rank_is_the_error_of_predict(store: Store, logs: Path, tmp_path: Path) -> None:
    """The first in the order of the rows, whichever rank meets it."""
    lines = (logs / "mon.tsv").read_text().splitlines(keepends=True)[:10_000]
    (tmp_path / "a.tsv").write_text("".join(lines))
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress("".join(lines).encode())[:-10_000])
    found = []
    for ranks in ("1", "2"):
        with redirect_stderr(io.StringIO()) as said:
            flags = ["--store", store.url, "--out", str(tmp_path / "out.csv"), "--ranks", ranks]
            assert main(["predict", str(tmp_path), *flags]) == 3
        found.append(said.getvalue())
        assert not (tmp_path / "out.csv").exists() and not (tmp_path / "out.csv.partial").exists()
    assert found[0] == found[1] and "b.tsv.gz is damaged or cut off" in found[0]


@pytest.mark.slow
def test_ranks_read_and_write_an_object_store(store: Store, logs: Path, tmp_path: Path, monkeypatch) -> None:
    """Version, rows and scores in a bucket: the ranks have the version from the process that fetched it."""
    server = pytest.importorskip("moto.server")
    with s3.served(server) as proxy, s3.bucket(proxy, monkeypatch) as url:
        fs = fsspec.filesystem("s3")
        fs.put(store.full("models"), f"{url}/store/models", recursive=True)
        fs.put(str(logs / "mon.tsv"), f"{url}/mon.tsv")
        for ranks in ("1", "2"):
            flags = ["--store", f"{url}/store", "--out", f"{url}/{ranks}.parquet", "--ranks", ranks]
            assert main(["predict", f"{url}/mon.tsv", *flags]) == 0
        assert fs.cat(f"{url}/1.parquet") == fs.cat(f"{url}/2.parquet")
        assert not [name for name in fs.find(url) if name.endswith(".partial")]


def test_predict_shows_how_far_it_is_where_somebody_watches(store: Store, logs: Path, tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    few = tmp_path / "few.tsv"
    few.write_text("".join((logs / "mon.tsv").read_text().splitlines(keepends=True)[:50]))
    flags = [str(few), "--store", store.url, "--out", str(tmp_path / "scores.csv")]
    with redirect_stderr(Terminal()) as watched:
        assert main(["predict", *flags]) == 0
    assert watched.getvalue().count("scoring [") == 2, "after the block, and at the end"
    assert watched.getvalue().endswith("] 100%\x1b[K\n") and watched.getvalue().count("\n") == 1
    with redirect_stderr(io.StringIO()) as log:
        assert main(["predict", *flags]) == 0
    assert "scoring" not in log.getvalue()


def test_predict_takes_rows_without_labels_and_leaves_out_what_does_not_parse(
    store: Store, logs: Path, tmp_path: Path, capfd
) -> None:
    lines = (logs / "mon.tsv").read_text().splitlines()[:50]
    labelled, bare = tmp_path / "labelled.tsv", tmp_path / "bare.tsv"
    labelled.write_text("\n".join([*lines[:7], "nonsense", *lines[7:]]) + "\n")
    bare.write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    assert main(["predict", str(labelled), "--store", store.url]) == 0
    one = capfd.readouterr()
    assert main(["predict", str(bare), "--store", store.url, "--no-label", "--model", "clicks"]) == 0
    two = capfd.readouterr()
    assert "1 row left out; the first: labelled.tsv line 8: 1 fields, expected 40" in one.err
    assert main(["predict", str(labelled), "--store", store.url, "--out", "/dev/stdout", "--json"]) == 0
    again = capfd.readouterr()
    assert again.out == one.out and '"rows_rejected": 1' in again.err
    with_labels = [line.split(",") for line in one.out.splitlines()]
    without = [line.split(",") for line in two.out.splitlines()]
    assert with_labels[0] == ["file", "line", "probability", "label"] and without[0] == ["file", "line", "probability"]
    assert [row[2] for row in with_labels[1:]] == [row[2] for row in without[1:]]
    assert with_labels[8][1] == "9", "line numbers are those of the file"


def test_predict_writes_rejected_rows_to_their_own_file(store: Store, logs: Path, tmp_path: Path, capfd) -> None:
    lines = (logs / "mon.tsv").read_text().splitlines()[:50]
    mixed, out, rejected = tmp_path / "mixed.tsv", tmp_path / "scores.csv", tmp_path / "deep/rejected.jsonl"
    mixed.write_text("\n".join([*lines[:7], "nonsense", *lines[7:], *["2" + lines[0][1:]] * 8]) + "\n")
    flags = [str(mixed), "--store", store.url, "--out", str(out)]
    assert main(["predict", *flags, "--rejected", str(rejected), "--json"]) == 0
    done = json.loads(capfd.readouterr().out)
    records = [json.loads(line) for line in rejected.read_text().splitlines()]
    assert (done["rows"], done["rows_rejected"], len(records), len(done["rejected"])) == (50, 9, 9, 5)
    assert [record["line"] for record in records] == [8, *range(52, 60)]
    assert records[0] == {"file": "mixed.tsv", "line": 8, "reason": "1 fields, expected 40"}
    assert records[1]["reason"] == "label is '2', expected '1' or '0'"
    for other, message in (
        (out, "is the file of --out too"),
        (f"{tmp_path}/deep/../scores.csv", "is the file of --out too"),
        ("-", "is the file of --out too"),
        (mixed, "one of the input files"),
    ):
        assert main(["predict", *flags, "--rejected", str(other)]) == 2
        assert message in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    rejected.unlink()
    out.unlink()
    assert main(["predict", *flags, "--rejected", str(tmp_path / "file/below.jsonl")]) == 7
    assert "--rejected <an fsspec URL you may write to>" in capfd.readouterr().err
    assert not out.exists() and not rejected.exists()


def test_predict_rejects_a_row_on_which_parsing_fails(
    store: Store, logs: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    real = parse._parse

    def limited(raw, lines, spec, rule):
        if (lines == 8).any():
            raise ZeroDivisionError("what nobody expected")
        return real(raw, lines, spec, rule)

    monkeypatch.setattr(parse, "_parse", limited)
    few, rejected = tmp_path / "few.tsv", tmp_path / "rejected.jsonl"
    few.write_text("\n".join((logs / "mon.tsv").read_text().splitlines()[:50]) + "\n")
    flags = ["--store", store.url, "--out", str(tmp_path / "scores.csv"), "--rejected", str(rejected), "--ranks", "1"]
    assert main(["predict", str(few), *flags, "--json"]) == 0
    done = json.loads(capfd.readouterr().out)
    assert (done["rows"], done["rows_rejected"]) == (49, 1)
    reason = "the line cannot be read: ZeroDivisionError: what nobody expected"
    assert [json.loads(line) for line in rejected.read_text().splitlines()] == [
        {"file": "few.tsv", "line": 8, "reason": reason}
    ]


def test_predict_refuses_a_version_of_which_other_code_computes_another_model(
    store: Store, logs: Path, monkeypatch, capfd
) -> None:
    real = DenseModel.forward
    monkeypatch.setattr(DenseModel, "forward", lambda self, *given: -real(self, *given))
    assert main(["predict", f"{logs}/mon.tsv", "--store", store.url, "--ranks", "1"]) == 7
    assert "what is installed here computes another model of the weights" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_predict_takes_lines_that_are_anything(store: Store, logs: Path, tmp_path: Path, seed: int) -> None:
    """As ``tests/ingest/test_fuzz_long.py`` does of ingestion: each line is a row or rejected."""
    rng, path = random.Random(seed), tmp_path / "log.tsv"
    good = (logs / "mon.tsv").read_text().splitlines()[:40]
    for _ in range(10):
        lines = [line.encode() for line in good]
        for _ in range(rng.randrange(1, 8)):
            fields = [rng.choice(FIELDS) if rng.random() < 0.2 else each for each in rng.choice(good).split("\t")]
            line = "\t".join(fields).encode("utf-8", "surrogatepass").replace(b"\n", b" ")
            lines.insert(rng.randrange(1, len(lines)), line)
        path.write_bytes(b"\n".join(lines) + b"\n")
        done = score_file(store, "clicks", None, str(path), lambda scored: None, cache_mib=16, ranks=1)
        assert done["rows"] + done["rows_rejected"] == len(lines) and done["rows"] >= len(good)


@alone
def test_however_many_rows_are_rejected_only_the_first_few_stay_in_memory() -> None:
    written: list[int] = []
    rejected = RejectCounter(lambda file, rejects: written.append(len(rejects)))
    tracemalloc.start()
    try:
        for block in range(50):
            rejected.add("f", [Reject(1000 * block + i, "kind", f"reason {block} {i}") for i in range(1000)])
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (rejected.rows, sum(written), len(rejected.first)) == (50_000, 50_000, 5)
    assert rejected.first[1] == "f line 1: reason 0 1"
    assert kept < 100_000


def test_predict_writes_a_whole_file_or_none_and_never_over_what_it_reads(
    store: Store, logs: Path, tmp_path: Path, capfd
) -> None:
    flags = ["--store", store.url, "--out"]
    empty, wrong, out = tmp_path / "empty.tsv", tmp_path / "wrong.tsv", tmp_path / "scores.parquet"
    empty.write_text("")
    assert main(["predict", str(empty), *flags, str(out)]) == 0
    assert pl.read_parquet(out).columns == ["file", "line", "probability", "label"]
    out.unlink()
    wrong.write_text("one\ntwo\n")
    assert main(["predict", str(wrong), *flags, str(out)]) == 3
    said = capfd.readouterr().err
    assert "none of 2 rows parses, the first: wrong.tsv line 1: 1 fields" in said and "config.yaml" in said
    assert main(["predict", str(wrong), *flags, str(wrong)]) == 2
    assert f"--out {wrong} is one of the input files" in capfd.readouterr().err
    assert wrong.read_text() == "one\ntwo\n" and sorted(tmp_path.iterdir()) == [empty, wrong]


def test_predict_takes_parquet_and_tells_programs_on_the_error_stream(
    store: Store, logs: Path, tmp_path: Path, capfd
) -> None:
    lines = (logs / "mon.tsv").read_text().splitlines()[:50]
    (tmp_path / "few.tsv").write_text("\n".join(lines) + "\n")
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    fields = [[field or None for field in line.split("\t")] for line in lines]
    pl.DataFrame(fields, schema=dict.fromkeys(names, pl.String), orient="row").write_parquet(tmp_path / "few.parquet")
    scores = []
    for name in ("few.tsv", "few.parquet"):
        assert main(["predict", str(tmp_path / name), "--store", store.url, "--json"]) == 0
        said = capfd.readouterr()
        assert json.loads(said.err)["rows"] == 50
        scores.append([line.split(",")[2:] for line in said.out.splitlines()])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("file", ["tables/C1.rows", "vocab/C2.parquet", "transforms.json", "config.yaml"])
def test_predict_scores_nothing_with_a_flipped_byte(store: Store, logs: Path, capfd, file: str) -> None:
    version = result(store, "mon")["model"]["uri"]
    path = Path(store.full(f"{version}/{file}"))
    sound = path.read_bytes()
    path.write_bytes(sound[:40] + bytes([sound[40] ^ 1]) + sound[41:])
    try:
        assert main(["predict", f"{logs}/mon.tsv", "--store", store.url]) == 7
        said = capfd.readouterr()
        assert said.out == "" and f"{path} is corrupt" in said.err
        assert "hint: another version: nightjar models ls clicks" in said.err
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["predict", "none.tsv"], 3, "hint: nightjar predict <file, directory or glob>"),
        (
            ["predict", "empty"],
            3,
            "empty is a folder without files, expected some whose names begin with neither . nor _",
        ),
        (["predict", "none.tsv", "--model", "other"], 2, "no model 'other' in store"),
        (["predict", "none.tsv", "--version", "v00009-aaaaaaaa"], 7, "model 'clicks' has no version 'v00009-aaaaaaaa'"),
        (["models", "show", "clicks", "v00009-aaaaaaaa"], 7, "model 'clicks' has no version 'v00009-aaaaaaaa'"),
        (["models", "promote", "clicks", "v00009-aaaaaaaa"], 7, "has no version 'v00009-aaaaaaaa'"),
        (["rollback"], 2, "model 'clicks' has no previous version to roll back to"),
        (["rollback"], 2, "nightjar models promote clicks <version> --reason"),
        (["models", "promote", "clicks", "../../runs"], 7, "has no version '../../runs'"),
        (["models", "ls", "--nonsense"], 2, "does not know --nonsense"),
    ],
)
def test_mistakes_are_one_message(
    store: Store, tmp_path: Path, monkeypatch, capfd, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main([*arguments, "--store", store.url]) == code
    said = capfd.readouterr()
    assert words in said.err and "hint:" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "x", "--cache-mib", "-5"],
        ["predict", "x", "--cache-mib", "nan"],
        ["models", "gc", "--min-age", "-1"],
        ["models", "gc", "--keep", "-1"],
    ],
)
def test_amounts_are_checked(capfd, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"argument {arguments[-2]}: {arguments[-1]!r} is not a" in capfd.readouterr().err


def test_models_are_listed_and_shown(store: Store, capfd) -> None:
    version = result(store, "mon")["model"]["version"]
    assert main(["models", "ls", "--store", store.url]) == 0
    assert f"> {version}" in capfd.readouterr().out
    assert main(["models", "show", "clicks", "--store", store.url]) == 0
    shown = capfd.readouterr().out
    assert f"clicks {version} (serves)" in shown and "26 tables in coding fp32" in shown and "run: mon" in shown
    assert main(["models", "gc", "--keep", "0", "--min-age", "0", "--store", store.url]) == 0
    assert "nothing to remove" in capfd.readouterr().out


def test_the_run_report_links_the_gates_own_page(store: Store) -> None:
    page = Path(store.full("runs/mon/report.html")).read_text()
    link = f"../../{result(store, 'mon')['stages']['publish']['artifact']}/gate.html"
    assert f'href="{link}"' in page and Path(store.full(f"runs/mon/{link}")).resolve().is_file()


@pytest.mark.slow
def test_the_same_night_again_does_nothing_and_a_better_one_follows(store: Store, logs: Path) -> None:
    """Tuesday starts from Monday's model and replaces it; a third night with mixed-up labels does not."""
    again = nightjar("run", *NIGHT, f"data.path={logs}/mon.tsv", "run=mon", f"store={store.url}")
    assert again.returncode == 0 and "publish    skipped" in again.stdout
    shutil.rmtree(store.full("runs/mon/publish"))  # as if it was killed after the version was written
    redone = nightjar("run", *NIGHT, f"data.path={logs}/mon.tsv", "run=mon", f"store={store.url}")
    assert redone.returncode == 0 and "of model clicks is this very model: its verdict stands" in redone.stdout
    warm = ["checkpoint.init_from=mon", "checkpoint.allow=[dataset]"]
    done = nightjar("run", *NIGHT, *warm, f"data.path={logs}/tue.tsv", "run=tue", f"store={store.url}")
    assert done.returncode == 0, done.stdout + done.stderr
    monday, tuesday = (result(store, run)["model"]["version"] for run in ("mon", "tue"))
    assert result(store, "tue")["gate"]["incumbent"] == monday
    card = store.read_json(f"models/clicks/{tuesday}/card.json")
    assert card["lineage"]["started_from"] == "mon" and card["lineage"]["incumbent"] == monday
    before = store.read_json("models/clicks/current.json")
    warm = ["checkpoint.init_from=tue", "checkpoint.allow=[dataset]"]
    bad = nightjar("run", *NIGHT, *warm, f"data.path={logs}/bad.tsv", "run=bad", f"store={store.url}")
    assert bad.returncode == 6, bad.stdout + bad.stderr
    assert "nightjar: the gate held v00003-" in bad.stderr and f"{tuesday} keeps serving" in bad.stderr
    found = result(store, "bad")
    assert found["error"]["exit_code"] == 6 and "model" not in found
    assert any(reason.startswith("calibration") for reason in found["gate"]["reasons"])
    assert any(reason.startswith("NE") for reason in found["gate"]["reasons"])
    assert store.read_json("models/clicks/current.json") == before
    restored = nightjar("rollback", "--store", store.url, "--reason", "a drill", "--json")
    assert json.loads(restored.stdout)["version"] == monday
