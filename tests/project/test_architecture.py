"""docs/architecture.md is true: its map has the rooms of the structure test, and every name of its walks exists."""

import ast
import re

from tests.project.test_structure import ALLOWED, LEAVES, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAP = PAGE.partition("## The rooms")[2].partition("```\n")[2].partition("```")[0]
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)(?:::([\w.]+))?`", PAGE)))
WALKS = re.findall(r"^## The way of (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)


def floors() -> list[set[str]]:
    """The rooms of the map, floor by floor from the top: words that end with ``/`` or ``.py``."""
    parts = re.split(r"^ *[├┌└]─+[┤┐┘]\n", MAP, flags=re.M)
    found = [set(re.findall(r"(?<=[│ ])([a-z_]+)(?:/|\.py)(?= )", part)) for part in parts]
    return [rooms for rooms in found if rooms]


def test_the_map_has_every_room_once() -> None:
    named = [room for rooms in floors() for room in rooms]
    assert sorted(named) == sorted(set(ALLOWED) - {"__init__"})


def test_the_ground_floor_is_what_any_room_may_import() -> None:
    assert floors()[-1] == LEAVES


def test_a_room_imports_lower_floors_only() -> None:
    level = {room: number for number, rooms in enumerate(floors()) for room in rooms}
    upward = [(room, other) for room, others in ALLOWED.items() for other in others if level[other] <= level[room]]
    assert upward == []


def defined(tree: ast.Module) -> set[str]:
    """Functions, classes, methods and constants of a module, methods as ``Class.method``."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names


def test_what_the_page_names_exists() -> None:
    missing = []
    for file, name in NAMES:
        path = ROOT / "pipeline" / file
        if not path.is_file() or (name and name not in defined(ast.parse(path.read_text()))):
            missing.append(f"pipeline/{file}::{name}")
    assert len(NAMES) > 50
    assert missing == [], "\n".join(missing)


def test_there_are_four_walks_through_several_rooms() -> None:
    assert [title for title, _ in WALKS] == ["a row", "a learning rate", "an embedding row", "an exit code"]
    for title, text in WALKS:
        rooms = {file.partition("/")[0] for file, _ in re.findall(r"`([a-z_/]+\.py)(::[\w.]+)`", text)}
        assert len(rooms) >= 4, title
