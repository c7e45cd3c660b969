"""Strategic merge of manifest fragments into pod templates (``launch.pods.patch``), as ``kubectl patch`` does it.

Dictionaries are merged, null removes a key. A list replaces the former one, but for the lists of ``KEYS``: their
entries are merged by that field. ``{$patch: delete}`` removes an entry, ``{$patch: replace}`` takes the rest as it is.
Source: Kubernetes, "Strategic Merge Patch" (staging/src/k8s.io/apimachinery), patch merge keys of ``core/v1`` types.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pipeline.config.kubernetes import PATCH_ALL
from pipeline.config.launch import PodConfig
from pipeline.core.errors import ConfigError

Object = dict[str, Any]
CONTAINER = "nightjar"  # the one that runs the stage
DIRECTIVE = "$patch"
# Fields of a pod template whose lists are merged, and by what.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
OURS = "nightjar/"  # labels by which the launcher finds its jobs again


def patched(template: Object, pods: PodConfig, stage: str) -> Object:
    """``template`` of a pod of ``stage`` with ``launch.pods.patch`` for all pods, then for this stage, merged into it.

    ConfigError for a fragment that changes what the launcher relies on, or whose lists lack the field they go by.
    """
    result = template
    for name in (PATCH_ALL, stage):
        if fragment := pods.patch.get(name):
            result = merged(result, fragment, f"launch.pods.patch.{name}")
            _check_kept(template, result, f"launch.pods.patch.{name}")
    return result


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], where: str) -> Object:
    """``patch`` on ``base``, neither of which changes. ``where``: the path of ``patch`` for messages."""
    result = copy.deepcopy(dict(base))
    for name, value in patch.items():
        place = f"{where}.{name}"
        if name == DIRECTIVE:
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            former = result.get(name) if value.get(DIRECTIVE) != "replace" else None
            result[name] = merged(former if isinstance(former, Mapping) else {}, value, place)
        elif isinstance(value, list) and name in KEYS:
            result[name] = _merged_list(result.get(name) or [], value, KEYS[name], place)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merged_list(base: list[Object], patch: list[Any], key: str, where: str) -> list[Object]:
    """Entries of ``patch`` merged into those of ``base`` that have the same ``key``; new ones come last."""
    result = [copy.deepcopy(entry) for entry in base]
    for entry in patch:
        if not isinstance(entry, Mapping) or key not in entry:
            raise ConfigError(
                f"{where} has an entry without {key}, by which its entries are merged: {entry}",
                hint=f"{where}=[{{{key}:<which>,..}}]",
            )
        place = next((at for at, former in enumerate(result) if former.get(key) == entry[key]), None)
        if entry.get(DIRECTIVE) == "delete":
            result = [former for former in result if former.get(key) != entry[key]]
        elif place is None:
            result.append(merged({}, entry, where))
        else:
            replaces = entry.get(DIRECTIVE) == "replace"
            result[place] = merged({} if replaces else result[place], entry, f"{where}.{entry[key]}")
    return result


def _check_kept(before: Object, after: Object, where: str) -> None:
    """ConfigError where the patch took or changed what finds, starts or ends the stage."""
    for what, one, two in (
        (f"labels {OURS}..", _own_labels(before), _own_labels(after)),
        ("spec.restartPolicy", before["spec"]["restartPolicy"], after.get("spec", {}).get("restartPolicy")),
        (f"the command of container {CONTAINER}", _command(before), _command(after)),
    ):
        if one != two:
            raise ConfigError(
                f"{where} changes {what}: {two}, expected {one}, on which the launcher relies",
                hint=f"leave it out of {where}; launch.* has settings for what Nightjar runs",
            )


def _own_labels(template: Object) -> dict[str, str]:
    labels = template.get("metadata", {}).get("labels") or {}
    return {name: value for name, value in labels.items() if name.startswith(OURS)}


def _command(template: Object) -> Any:
    for container in template.get("spec", {}).get("containers") or []:
        if container.get("name") == CONTAINER:
            return [*(container.get("command") or []), *(container.get("args") or [])]
    return None
