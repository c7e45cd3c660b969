"""Damaged checkpoints that a training passed over: out of the way, listed by ``ckpt ls``, removed by ``ckpt gc`` only.

Each has a folder ``<directory>/aside/<name>.<n>`` with a record of what is wrong. On a local disk the checkpoint's
folder is renamed to it. An object store has no rename: the record is written, then the manifest goes, and the files
stay where they are until a checkpoint of the same step needs the place; then they are copied to the folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.index import readable, step_of
from pipeline.errors import ArtifactError
from pipeline.store import removal
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST

FOLDER, RECORD = "aside", "set-aside.json"
FORMER = "former-manifest.json"


@dataclass(frozen=True)
class SetAside:
    """A checkpoint set aside. ``path``: its folder; ``former``: where it lay; ``why``: what is wrong with it.

    ``files``: the folder that holds its files, one of the two; ``created``: Unix seconds, None where it is not known;
    ``parents``: names of what it rests on, as far as it could be read.
    """

    path: str
    former: str
    why: str
    files: str
    created: float | None
    parents: tuple[str, ...] = ()


def set_aside(store: Store, directory: str, problems: dict[str, str]) -> list[str]:
    """Take the checkpoints ``problems`` ({name: what is wrong}) of ``directory`` out of the way; lines that say so.

    Those that rest on others go first. One that is gone or was set aside before is passed over, so that a call that
    was killed can be repeated. ArtifactError where the store refuses it.
    """
    lines = []
    for name in sorted(problems, key=step_of, reverse=True):
        path = f"{directory}/{name}"
        if not store.exists(f"{path}/{MANIFEST}"):
            continue
        target = _free_place(store, path)
        parents = [parent for each in readable(store, [path]) for parent in each.summary["parents"]]
        record = {"checkpoint": path, "why": problems[name], "created": time.time(), "parents": parents}
        with removal.removing(path):
            if store.is_local:
                store.write_json(f"{path}/{RECORD}", {**record, "moved": True})
                store.fs.makedirs(store.full(f"{directory}/{FOLDER}"), exist_ok=True)
                Path(store.full(path)).rename(store.full(target))
            else:
                store.write_json(f"{target}/{RECORD}", {**record, "moved": False})
                store.fs.cp_file(store.full(f"{path}/{MANIFEST}"), store.full(f"{path}/{FORMER}"))
                store.fs.rm_file(store.full(f"{path}/{MANIFEST}"))
        lines.append(f"checkpoint {path} is set aside as {target}; nightjar ckpt gc removes it")
    return lines


def _free_place(store: Store, path: str) -> str:
    """The folder for the checkpoint at ``path``: that of a call that was killed, or a new one."""
    directory, _, name = path.rpartition("/")
    for each in listed(store, directory):
        if each.former == path and each.files == path:
            return each.path
    names = store.names(f"{directory}/{FOLDER}")
    taken = [int(number) for each in names if (number := each.removeprefix(f"{name}.")).isdigit()]
    return f"{directory}/{FOLDER}/{name}.{max(taken, default=0) + 1}"


def listed(store: Store, directory: str) -> list[SetAside]:
    """What was set aside in ``directory``, in the order of names."""
    return [_read(store, directory, name) for name in store.names(f"{directory}/{FOLDER}")]


def _read(store: Store, directory: str, name: str) -> SetAside:
    path = f"{directory}/{FOLDER}/{name}"
    former = f"{directory}/{name.partition('.')[0]}"
    try:
        record = store.read_json(f"{path}/{RECORD}")
        files = path if record["moved"] else former
        parents = tuple(map(str, record.get("parents", ())))
        return SetAside(path, former, str(record["why"]), files, float(record["created"]), parents)
    except (ArtifactError, KeyError, TypeError, ValueError):  # it is damaged itself
        return SetAside(path, former, f"its {RECORD} cannot be read", path if store.is_local else former, None)


def in_place(store: Store, directory: str) -> set[str]:
    """Names in ``directory`` whose files, without a manifest, are those of a checkpoint that was set aside."""
    there = [each.files for each in listed(store, directory) if each.files != each.path]
    return {files.rpartition("/")[2] for files in there if not store.exists(f"{files}/{MANIFEST}")}


def spared(store: Store, directory: str) -> set[str]:
    """Names in ``directory`` that a sweep leaves alone: ``in_place``, and what any that was set aside rests on.

    Such a one may have lost its manifest alone, which is what was wrong with those that rested on it.
    """
    return in_place(store, directory).union(*(each.parents for each in listed(store, directory)))


def make_room(store: Store, path: str) -> None:
    """Before something is written at ``path``: files of a checkpoint set aside that lie there go to its folder."""
    directory = path.rpartition("/")[0]
    for each in [] if store.is_local else listed(store, directory):
        if each.files != path or store.exists(f"{path}/{MANIFEST}"):
            continue
        begin = store.full(path)
        store.fs.invalidate_cache(begin)
        for full in store.fs.find(begin):
            store.fs.cp_file(full, f"{store.full(each.path)}{full.removeprefix(begin)}")
        record = {
            "checkpoint": path,
            "why": each.why,
            "created": each.created or time.time(),
            "parents": list(each.parents),
            "moved": True,
        }
        store.write_json(f"{each.path}/{RECORD}", record)
        removal.remove(store, path)


def size(store: Store, each: SetAside) -> int:
    """Bytes of the files of a checkpoint set aside."""
    return sum(info["size"] for info in store.fs.find(store.full(each.files), detail=True).values())


def remove(store: Store, each: SetAside) -> None:
    """Remove a checkpoint set aside, its files first. ArtifactError where the store refuses it."""
    if each.files != each.path and not store.exists(f"{each.files}/{MANIFEST}"):
        removal.remove(store, each.files)
    removal.remove(store, each.path)
