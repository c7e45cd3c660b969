"""Patched pod templates, shown to the API server before anything starts: it checks them and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api, RefusedError
from pipeline.launch.kubernetes.pods import LAUNCHER, pod_template

REFUSED = (400, 422)


def check_templates(api: Api, config: Config) -> None:
    """LaunchError for a pod that the server would refuse, or whose ``launch.pods.patch`` has fields it does not know.

    A dry run with strict field validation; servers older than 1.25 drop unknown fields without a word, which shows in
    what they answer. Nothing is asked where there is no patch.
    """
    if not config.launch.pods.patch:
        return
    path = f"/api/v1/namespaces/{config.launch.namespace}/podtemplates"
    for stage in [*(stage for stage in config.stages if stage not in config.launch.inline), LAUNCHER]:
        template = pod_template(config, stage, ["true"], {}, {}, 1)
        body = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "nightjar-trial"}, "template": template}
        hint = f"launch.pods.patch.{stage} or .all; nightjar launch render shows the pods"
        try:
            answer = api.create(path, body, dryRun="All", fieldValidation="Strict")
        except RefusedError as error:
            if error.status not in REFUSED:
                raise
            raise LaunchError(f"pods of {stage}: {error.message}", hint=hint) from None
        if unknown := list(_dropped(template, answer.get("template") or {}, "")):
            raise LaunchError(f"pods of {stage}: the API server knows no field {', '.join(unknown)}", hint=hint)


def _dropped(sent: Any, kept: Any, path: str) -> Iterator[str]:
    """Paths of what was ``sent`` and is not in what the server ``kept``; empty values may be left out."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            place = f"{path}.{name}".removeprefix(".")
            if not isinstance(kept, dict) or name not in kept:
                if value or value is True:
                    yield place
            else:
                yield from _dropped(value, kept[name], place)
    elif isinstance(sent, list) and isinstance(kept, list):
        for index, (one, other) in enumerate(zip(sent, kept, strict=False)):
            yield from _dropped(one, other, f"{path}[{index}]")
