"""A whole search from the command line, what it writes, an outside part, and the training of the model found."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import PlanError
from pipeline.plugins.search.architecture_space import ArchitectureSpace
from pipeline.plugins.search.learning import SearchState, SearchStore
from pipeline.plugins.search.loop import decided, require_memory, search, table_bytes, warning
from pipeline.plugins.search.rows import PartReader
from pipeline.plugins.search.search_page import search_page, search_text
from pipeline.records import SearchRecord, read
from pipeline.specs import SEARCH_PARTS, Decision, SearchPart
from pipeline.stages.execution import with_resolved_batch
from pipeline.stages.stage_inputs import read_dataset
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store
from pipeline.training.parquet import SplitReader
from tests.commands import nightjar
from tests.waits import PATIENCE

ROWS = 12_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which a and b interact, and c does nothing."""
    path = tmp_path_factory.mktemp("search")
    rng = np.random.default_rng(1)
    ids = {name: rng.integers(0, 8, ROWS) for name in "abc"}
    logit = 3 * rng.standard_normal((8, 8))[ids["a"], ids["b"]]
    clicked = rng.random(ROWS) < 1 / (1 + np.exp(-logit))
    columns = {name: pa.array([f"v{each}" for each in values]) for name, values in ids.items()}
    pq.write_table(pa.table({"label": clicked.astype(int), "x": rng.random(ROWS), **columns}), path / "log.parquet")
    return path


def overrides(folder: Path) -> list[str]:
    return [
        "data=parquet",
        f"data.path={folder}/log.parquet",
        "+data.dense.x={}",
        "data.sparse_defaults.min_count=1",
        *(f"+data.sparse.{name}={{}}" for name in "abc"),
        f"store={folder}/store",
        "hardware=laptop",
        "model.embedding_dim=8",
        "model.bottom_mlp=[16]",
        "model.top_mlp=[32,16]",
        "train.global_batch=64",
        "train.threads_per_rank=1",
        "search.epochs=2",
        "search.lr=0.03",
        "search.cost=0.05",
        "search.memory=0.05",
    ]


@pytest.fixture(scope="module")
def done(folder: Path) -> Path:
    """The store with one search of this log."""
    result = nightjar("search", *overrides(folder), "search=first")
    code = result.returncode
    assert code == 0, result.stderr
    assert "best.yaml" in result.stdout and "ms (predicted)" in result.stdout
    return folder / "store" / "searches" / "first"


def dataset_of(config: Config) -> tuple[Config, Store, Artifact]:
    store = Store(config.store)
    artifact = store.get(steps(config, store, last="ingest")[0].path, "ingest")
    return with_resolved_batch(config, store, artifact), store, artifact


def test_it_writes_a_record_a_page_and_an_experiment_that_trains(folder: Path, done: Path) -> None:
    record = read(SearchRecord, Store(str(folder / "store")), "searches/first/search.json")
    assert record.after.step_ms < record.before.step_ms and record.after.total < record.before.total
    assert record.decisions["a x b"].chosen is True
    assert len(record.points) == len(record.decisions["a x b"].history) == 24
    page = (done / "report.html").read_text()
    assert "width of a" in page and "Probabilities over the steps" in page and "http" not in page.split("</style>")[1]
    own = folder / "my" / "experiment"
    own.mkdir(parents=True)
    (own / "best.yaml").write_text((done / "best.yaml").read_text())
    config = compose(["experiment=best", "hardware=laptop"], str(folder / "my"))
    for name, each in record.decisions.items():
        if name.startswith("width of "):
            assert config.model.dim_of(name.removeprefix("width of ")) == each.chosen
    run = ["experiment=best", "run=found", f"store={folder}/store", "stages=[ingest,plan,partition,train,evaluate]"]
    one = ["train.threads_per_rank=1", "launch.inline=[ingest,plan,partition,train,evaluate]"]
    result = nightjar("run", "-cd", str(folder / "my"), *run, *one)
    assert result.returncode == 0, result.stderr
    ne = json.loads((folder / "store/runs/found/result.json").read_text())["eval"]["ne"]
    assert ne < 1


def test_an_equal_search_is_not_done_twice_and_a_name_is_not_taken_twice(folder: Path, done: Path) -> None:
    written = (done / "search.json").stat().st_mtime_ns
    again = nightjar("search", *overrides(folder), "search=first", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["name"] == "first"
    assert (done / "search.json").stat().st_mtime_ns == written
    other = nightjar("search", *overrides(folder), "search=first", "search.cost=0.2")
    assert other.returncode == 2
    assert "search 'first' is in the store already, with other settings" in other.stderr
    assert "search=<another name>" in other.stderr


def _killed_in_step(number: int, arguments: list[str]) -> None:
    """``nightjar`` in this process, which dies in the given step of the search that it does, counted from one."""
    import sys

    from pipeline.cli import main
    from pipeline.plugins.search.learning import Learner

    real, steps = Learner.learn_weights, iter(range(1, number + 1))

    def dies(learner: Learner, *given: object, **named: object) -> float:
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(learner, *given, **named)  # type: ignore[arg-type]

    Learner.learn_weights = dies  # type: ignore[method-assign,assignment]
    sys.argv = ["nightjar", *arguments]
    main()


# Of 240 steps: after choices were measured twice; and before that, while the weights learn alone.
@pytest.mark.parametrize("steps", [(184,), pytest.param((20, 184), marks=pytest.mark.slow)], ids=["once", "twice"])
def test_a_killed_search_goes_on_bit_for_bit(folder: Path, done: Path, steps: tuple[int, ...]) -> None:
    store = folder / f"killed-{len(steps)}"
    command = ["search", *overrides(folder), f"store={store}", "search=first"]
    for number in steps:
        process = multiprocessing.get_context("forkserver").Process(target=_killed_in_step, args=(number, command))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        assert (store / "searching/first/search.state").exists() and not (store / "searches/first").exists()
    last = nightjar(*command)
    assert last.returncode == 0 and "the search goes on from step" in last.stdout, last.stderr
    records = [json.loads((each / "searches/first/search.json").read_text()) for each in (folder / "store", store)]
    for record in records:
        del record["seconds"]
    assert records[0] == records[1]
    assert (store / "searches/first/best.yaml").read_text() == (done / "best.yaml").read_text().replace(
        str(folder / "store"), str(store)
    )
    assert not (store / "searching/first/search.state").exists()


def test_a_state_that_is_damaged_or_of_another_search_is_left_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    kept = SearchStore(store, "searching/a", "key")
    kept.write(SearchState(tensors={"x": torch.arange(3.0)}, values={"done": 1, "loss": 0.1}))
    found = kept.read()
    assert found is not None and found.values == {"done": 1, "loss": 0.1}
    assert torch.equal(found.tensors["x"], torch.arange(3.0))
    assert SearchStore(store, "searching/a", "other").read() is None
    data = bytearray((tmp_path / kept.path).read_bytes())
    data[-1] ^= 1
    (tmp_path / kept.path).write_bytes(data)
    assert kept.read() is None
    kept.remove()
    assert kept.read() is None and not (tmp_path / kept.path).exists()


def test_two_searches_of_one_name_do_not_run_at_once(folder: Path, done: Path) -> None:
    with Store(str(folder / "store")).locked("searching/first"):
        result = nightjar("search", *overrides(folder), "search=first")
    assert result.returncode == 8 and "search 'first' is running already" in result.stderr


def test_tables_that_do_not_fit_are_refused_before_the_search(folder: Path, done: Path) -> None:
    config, store, dataset = dataset_of(compose(overrides(folder)))
    space = ArchitectureSpace.of(config, *read_dataset(store, dataset))
    needed = table_bytes(space, 8)
    rows = sum(table.rows for table in space.schema.tables)
    assert needed == 2 * rows * (8 + 1) * 4  # rowwise adagrad: a value for each row
    require_memory(space, room=needed)
    with pytest.raises(PlanError, match=r"at their full width of 8.*but this machine has") as caught:
        require_memory(space, room=needed - 1)
    assert "data.sparse_defaults.min_count" in str(caught.value.hint)


def test_both_parts_of_the_rows_are_disjoint_and_together_all_of_them(folder: Path, done: Path) -> None:
    config, store, dataset = dataset_of(compose(overrides(folder)))
    whole = SplitReader(store, dataset, "train")
    parts = [PartReader(store, dataset, share=0.25, held=held, seed=3) for held in (False, True)]
    assert [part.rows for part in parts] == [whole.rows - round(whole.rows / 4), round(whole.rows / 4)]

    def numbers(reader: SplitReader) -> list[float]:
        """The numeric feature, which tells rows apart."""
        found: list[float] = []
        for group in reader.groups:
            columns = reader.allocate(group.rows)
            reader.read(group, columns, 0)
            found += columns.dense[0].tolist()
        return found

    one, other = map(numbers, parts)
    assert sorted(one + other) == sorted(numbers(whole))


class SharedWidth(SearchPart):
    """One width for all tables."""

    name = "shared_width"
    doc = "the width of all tables."

    def decisions(self, config, schema):  # type: ignore[no-untyped-def]
        return [Decision(name="embedding_dim", choices=(8, 4))]

    def attach(self, net, decisions):  # type: ignore[no-untyped-def]
        masks = torch.tensor([[1.0] * 8, [1.0] * 4 + [0.0] * 4])
        net.at("vectors", lambda vectors, gates: vectors * (gates["embedding_dim"] @ masks))

    def apply(self, config, chosen):  # type: ignore[no-untyped-def]
        return replace(config, model=replace(config.model, embedding_dim=chosen["embedding_dim"]))


def test_a_part_of_another_package_is_searched_like_the_others(folder: Path, done: Path) -> None:
    with SEARCH_PARTS.added(SharedWidth()):
        config = compose(
            [
                *overrides(folder),
                "search.parts=[shared_width]",
                "search.memory=1.0",
                "search.epochs=1",
                "search.name=own",
            ]
        )
        config, store, dataset = dataset_of(config)
        space = ArchitectureSpace.of(config, *read_dataset(store, dataset))
        record, again = (search(space, store, dataset) for _ in range(2))
    assert record.decisions["embedding_dim"].chosen == 4  # half of the bytes, at this weight
    assert record.after.total < record.before.total
    assert record.decisions == again.decisions and record.points == again.points
    assert "shared_width: 1 of 1 decision changed" in search_text(record) and "embedding_dim" in search_page(record)


def test_a_search_that_decides_nothing_says_so(folder: Path, done: Path) -> None:
    given = [*overrides(folder), "search.lr=0.00001", "search.epochs=1", "search.name=flat"]
    given += ["search.parts=[mlps]"]
    config, store, dataset = dataset_of(compose(given))
    record = search(ArchitectureSpace.of(config, *read_dataset(store, dataset)), store, dataset)
    assert set(record.undecided) == set(record.decisions)
    said = warning(record, config.search)
    assert "decided 0 of 4 questions" in said and "search.epochs=2" in said and "search.lr=2e-05" in said


@pytest.mark.parametrize(("row", "is_decided"), [([0.7, 0.3], False), ([0.8, 0.2], True), ([0.3, 0.6, 0.1], False)])
def test_a_decision_is_made_where_one_choice_is_much_more_likely(row: list[float], is_decided: bool) -> None:
    assert decided(row) is is_decided


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["search.parts=[]"], "search.parts is empty, expected some of: widths, interactions, mlps"),
        (["search.parts=[width]"], "search.parts"),
        (["search=a/b"], "search is 'a/b', expected at most 100 letters"),
    ],
)
def test_a_users_mistake_is_one_message(folder: Path, done: Path, change: list[str], said: str) -> None:
    result = nightjar("search", *overrides(folder), "search=wrong", *change)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
