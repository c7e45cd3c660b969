"""Sets aside damaged checkpoints that a training skipped. ``ckpt ls`` lists them; only ``ckpt gc`` removes them.

Each has a folder ``<directory>/aside/<name>.<n>`` with a record of what is wrong. On a local disk the checkpoint's
folder is renamed to it. An object store has no rename: the record is written, then the manifest goes, and the files
stay where they are until a checkpoint of the same step needs the place; then they are copied to the folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.index import readable, step_of
from pipeline.core.errors import ArtifactError
from pipeline.store import removal
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST

FOLDER, RECORD = "aside", "set-aside.json"
_FORMER_MANIFEST = "former-manifest.json"


@dataclass(frozen=True)
class SetAside:
    """A checkpoint set aside: ``path`` is its folder, ``former`` its former place, ``why`` says what is wrong with it.

    ``files`` is the folder that holds its files, one of the two; ``created`` is in Unix seconds, None where unknown;
    ``parents`` are the names that it rests on, as far as they could be read.
    """

    path: str
    former: str
    why: str
    files: str
    created: float | None
    parents: tuple[str, ...] = ()


def set_aside(store: Store, directory: str, problems: dict[str, str]) -> list[str]:
    """Set aside the checkpoints ``problems`` ({name: what is wrong}) of ``directory``; returns lines to log.

    One that is gone or was set aside before is skipped, so that a call that was killed can be repeated. Raises
    ArtifactError if the store refuses.
    """
    lines = []
    # Checkpoints that rest on others go first.
    for name in sorted(problems, key=step_of, reverse=True):
        path = f"{directory}/{name}"
        if not store.exists(f"{path}/{MANIFEST}"):
            continue
        target = _choose_folder(store, directory, name)
        parents: list[str] = []
        for artifact in readable(store, [path]):
            parents += artifact.summary["parents"]
        record = {"checkpoint": path, "why": problems[name], "created": time.time(), "parents": parents}
        with removal.removing(path):
            if store.is_local:
                store.write_json(f"{path}/{RECORD}", {**record, "moved": True})
                store.fs.makedirs(store.full(f"{directory}/{FOLDER}"), exist_ok=True)
                Path(store.full(path)).rename(store.full(target))
            else:
                # Write the record first: from then on the files are known to belong to a checkpoint that was set aside.
                store.write_json(f"{target}/{RECORD}", {**record, "moved": False})
                store.fs.cp_file(store.full(f"{path}/{MANIFEST}"), store.full(f"{path}/{_FORMER_MANIFEST}"))
                store.fs.rm_file(store.full(f"{path}/{MANIFEST}"))
        lines.append(f"checkpoint {path} is set aside as {target}; nightjar ckpt gc removes it")
    return lines


def _choose_folder(store: Store, directory: str, name: str) -> str:
    # Returns the folder of a call that was killed, or a new one.
    path = f"{directory}/{name}"
    for one in listed(store, directory):
        if one.former == path and one.files == path:
            return one.path
    highest = 0
    for folder in store.names(f"{directory}/{FOLDER}"):
        number = folder.removeprefix(f"{name}.")
        if number.isdigit():
            highest = max(highest, int(number))
    return f"{directory}/{FOLDER}/{name}.{highest + 1}"


def listed(store: Store, directory: str) -> list[SetAside]:
    """List what was set aside in ``directory``, in the order of names."""
    found = []
    for name in store.names(f"{directory}/{FOLDER}"):
        path = f"{directory}/{FOLDER}/{name}"
        former = f"{directory}/{name.partition('.')[0]}"
        try:
            record = store.read_json(f"{path}/{RECORD}")
            files = path if record["moved"] else former
            parents = tuple(map(str, record.get("parents", ())))
            one = SetAside(path, former, str(record["why"]), files, float(record["created"]), parents)
        except (ArtifactError, KeyError, TypeError, ValueError):
            # The record itself is damaged. On a disk, the files were moved when it was set aside.
            files = path if store.is_local else former
            one = SetAside(path, former, f"its {RECORD} cannot be read", files, None)
        found.append(one)
    return found


def in_place(store: Store, directory: str) -> set[str]:
    """Return the names in ``directory`` whose files, without a manifest, belong to a checkpoint that was set aside."""
    names = set()
    for one in listed(store, directory):
        if one.files != one.path and not store.exists(f"{one.files}/{MANIFEST}"):
            names.add(one.files.rpartition("/")[2])
    return names


def spared(store: Store, directory: str) -> set[str]:
    """Return the names in ``directory`` that a sweep must leave alone: ``in_place`` and parents of those set aside."""
    names = in_place(store, directory)
    # A parent may have lost only its manifest, which is what was wrong with those that rested on it.
    for one in listed(store, directory):
        names |= set(one.parents)
    return names


def make_room(store: Store, path: str) -> None:
    """Clear ``path`` before a write: move the files of a checkpoint that was set aside from there to its folder."""
    # On a disk they were moved when it was set aside.
    if store.is_local:
        return
    for one in listed(store, path.rpartition("/")[0]):
        if one.files != path or store.exists(f"{path}/{MANIFEST}"):
            continue
        begin = store.full(path)
        store.fs.invalidate_cache(begin)
        for full in store.fs.find(begin):
            store.fs.cp_file(full, f"{store.full(one.path)}{full.removeprefix(begin)}")
        record = {
            "checkpoint": path,
            "why": one.why,
            "created": one.created or time.time(),
            "parents": list(one.parents),
            "moved": True,
        }
        store.write_json(f"{one.path}/{RECORD}", record)
        removal.remove(store, path)


def size(store: Store, one: SetAside) -> int:
    """Return the bytes of the files of ``one``, a checkpoint that was set aside."""
    return sum(info["size"] for info in store.fs.find(store.full(one.files), detail=True).values())


def remove(store: Store, one: SetAside) -> None:
    """Remove ``one``, a checkpoint that was set aside, files first. ArtifactError if the store refuses."""
    if one.files != one.path and not store.exists(f"{one.files}/{MANIFEST}"):
        removal.remove(store, one.files)
    removal.remove(store, one.path)
