"""Composed trees that are kept: the same as Hydra's own, and none older than what it was composed from."""

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipeline.config.compose import ROOT, _resolve, compose, from_yaml, hydra_session, to_yaml, trees
from pipeline.config.compose import overrides as complaints
from pipeline.config.compose.trees import _cache, _files, compose_lines, copy_tree
from pipeline.core.errors import ConfigError
from pipeline.specs import MODELS, SEARCH_PARTS

CASES = [
    [],
    pytest.param(["train.lr=0.5", "run=x", "seed=7"], marks=pytest.mark.slow),
    ["data=criteo", "data.path=a", "+data.sparse.C1.rows=9", "~data.sparse.C1", "model=dcnv2", "train.epochs=3"],
    ["experiment=demo", "train.epochs=4", "data.synthetic.rows=1000", "++data.synthetic.days=1"],
    pytest.param(["stages=[ingest]", "train.epochs=1", "train.epochs=2"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_a_kept_tree_composes_to_what_hydra_composes(overrides: list[str]) -> None:
    compose([*overrides, "train.log_every_steps=9"])
    with hydra_session() as (hydra, extra):
        mended = complaints.mend_additions(complaints.parse(overrides))
        known = _resolve(compose_lines(hydra, ROOT, [*extra, *mended]))
    found = compose(overrides)
    assert found == known
    assert to_yaml(found) == OmegaConf.to_yaml(OmegaConf.structured(known))
    assert from_yaml(to_yaml(found)) == found


def described(node: Any) -> Any:
    """All that OmegaConf knows of a tree."""
    known = {name: value for name, value in vars(node).items() if name not in ("_content", "_parent", "_flags_cache")}
    content = vars(node).get("_content")
    if isinstance(content, dict):
        return type(node), known, {name: described(child) for name, child in content.items()}
    if isinstance(content, list):
        return type(node), known, [described(child) for child in content]
    return type(node), known, content


def nodes(tree: Any) -> Iterator[Any]:
    """``tree`` and all below it."""
    yield tree
    content = vars(tree).get("_content")
    for child in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        assert child._get_parent() is tree
        yield from nodes(child)


def test_a_copied_tree_is_the_deep_copy_and_shares_nothing_with_the_kept_one() -> None:
    with hydra_session() as (hydra, extra):
        tree = compose_lines(hydra, ROOT, [*extra, "data=criteo", "data.path=a", "+data.sparse.C1.rows=9"])
    copied = copy_tree(tree)
    assert described(copied) == described(copy.deepcopy(tree))
    kept = {id(part) for node in nodes(tree) for part in (node, node._metadata, node._metadata.flags)}
    assert not kept & {id(part) for node in nodes(copied) for part in (node, node._metadata, node._metadata.flags)}


def test_what_one_call_sets_another_does_not_see() -> None:
    plain = compose([])
    changed = compose(["train.lr=0.123", "+data.sparse.own={rows: 5}", "data.sparse_defaults.rows=77"])
    assert changed.train.lr == 0.123 and "own" in changed.data.sparse
    assert compose([]) == plain and "own" not in plain.data.sparse


def test_a_file_that_changes_is_read_again_and_one_that_comes_is_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "own.yaml"
    for number, lr in enumerate((0.25, 0.75)):
        file.write_text(f"# @package _global_\ntrain: {{lr: {lr}}}\n")
        os.utime(file, ns=(number, number))  # the clock of a file system may be too coarse to tell them apart
        assert compose(["experiment=own"], str(tmp_path)).train.lr == lr
    with pytest.raises(ConfigError, match="experiment"):
        compose(["experiment=own"])


def test_a_file_of_a_folder_that_is_a_link_is_read_again(tmp_path: Path) -> None:
    for name in ("kept", "my"):
        (tmp_path / name).mkdir()
    (tmp_path / "my" / "experiment").symlink_to(tmp_path / "kept")
    file = tmp_path / "kept" / "own.yaml"
    for number, lr in enumerate((0.25, 0.75)):
        file.write_text(f"# @package _global_\ntrain: {{lr: {lr}}}\n")
        os.utime(file, ns=(number, number))
        assert compose(["experiment=own"], str(tmp_path / "my")).train.lr == lr


def test_of_a_projects_directory_only_groups_are_looked_at(tmp_path: Path) -> None:
    for name in ("experiment/own.yaml", "store/runs/first/config.yaml", ".venv/lib/package/data.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    assert [Path(name).name for name, *_ in _files([tmp_path], ["experiment", "data"])] == ["own.yaml"]


def test_a_choice_that_is_added_later_is_one() -> None:
    own = copy.copy(SEARCH_PARTS.get("mlps"))
    own.name = "own_part"
    compose([])
    with SEARCH_PARTS.added(own):
        assert "own_part" in compose([]).search.parts
    assert "own_part" not in compose([]).search.parts


def test_a_tree_from_before_a_choice_was_added_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own, composed = copy.copy(SEARCH_PARTS.get("mlps")), []
    own.name = "own_part"
    compose([])
    monkeypatch.setattr(trees, "compose_lines", lambda *given: composed.append(given) or compose_lines(*given))
    with SEARCH_PARTS.added(own):
        compose([])
    compose([])
    assert len(composed) == 1, "with the added choice alone"


def test_choices_that_go_in_the_order_in_which_they_came_are_gone() -> None:
    part, model = copy.copy(SEARCH_PARTS.get("mlps")), replace(MODELS.get("dlrm"), name="own_model")
    part.name = "own_part"
    first, second = SEARCH_PARTS.added(part), MODELS.added(model)
    for begun in (first, second):
        begun.__enter__()
        assert "own_part" in compose([]).search.parts
    for ended in (first, second):
        ended.__exit__(None, None, None)
        assert "own_part" not in compose([]).search.parts


def test_a_wrong_value_is_told_as_before() -> None:
    for overrides in (["train.lr=fast"], ["train.lrr=1"], ["~train.nothing"], ["train.lr={a: 1}"]):
        texts = []
        for _ in range(2):
            with pytest.raises(ConfigError) as told:
                compose(overrides)
            texts.append(str(told.value))
        assert texts[0] == texts[1]


def test_trees_that_are_kept_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_cache) <= trees.CACHED_TREES <= 16
    monkeypatch.setattr(trees, "CACHED_TREES", 1)
    for hidden in range(2):
        compose([f"hydra.job.name=n{hidden}"])
        assert len(_cache) == 1
