"""Checks of ``launch=kubernetes``: names, image, references to secrets, and whether pods see the store and the logs."""

from __future__ import annotations

import re

from pipeline.config import Config
from pipeline.config.hardware import HardwareConfig
from pipeline.config.launch import LaunchConfig, PodConfig
from pipeline.config.nightly import ScheduleConfig
from pipeline.core.errors import ConfigError
from pipeline.specs import STAGES

DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123
SECRET_KEY = re.compile(r"[a-z0-9][-a-z0-9.]{0,252}/[-._A-Za-z0-9]{1,253}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CRON_PART = re.compile(r"(?:[*?]|(\w+)(?:-(\w+))?)(?:/([1-9]\d*))?")
# Fields of a cron schedule: first value, last value, names of values.
CRON_FIELDS = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day": (1, 31, ()),
    "month": (1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    "weekday": (0, 6, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
}
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
# The launcher's key in ``resources`` and ``patch``, beside the stages' names.
LAUNCHER = "launcher"
# The key in ``resources`` and ``patch`` for pods on embedding hosts, of any stage.
EMBEDDING = "embedding"
KUEUE_JOBS = ("indexed", "jobset")
# The key in ``patch`` for what applies to every pod.
PATCH_ALL = "all"


def check_kubernetes(config: Config) -> None:
    """Raise ConfigError for a setting that a cluster would refuse."""
    pods = config.launch.pods
    if not DIGEST.fullmatch(pods.image):
        raise ConfigError(
            f"launch.pods.image is {pods.image!r}, expected an image by digest, so that every pod of "
            "every attempt runs the same code",
            hint="launch.pods.image=<registry>/<name>@sha256:<64 hex digits>; skopeo inspect or docker push shows it",
        )
    _check_names(config.launch, config.schedule)
    # A CronJob names each Job after itself and its minute, and a Job's name has at most 63 characters.
    if len(config.schedule.name) > 52:
        raise ConfigError(
            f"schedule.name has {len(config.schedule.name)} characters, expected at most 52, "
            "because the cluster appends 11",
            hint=f"schedule.name={config.schedule.name[:40]}",
        )
    if problem := _cron_problem(config.schedule.cron):
        raise ConfigError(
            f"schedule.cron is {config.schedule.cron!r}, expected {problem}", hint="'schedule.cron=0 2 * * *'"
        )
    if config.launch.kueue and config.launch.job not in KUEUE_JOBS:
        raise ConfigError(
            f"launch.kueue admits jobs of Kubernetes, but launch.job is {config.launch.job}, with queues of its own",
            hint=f"launch.job={KUEUE_JOBS[0]}, or launch.kueue=false",
        )
    _check_hosts(config.launch, config.hardware)
    _check_embedding(config.launch, config.hardware)
    _check_pods(pods)
    _check_patch(pods)
    # ``data.path`` of a warehouse's table or of a topic is not a folder that pods must see.
    connector, logs = config.data.connector, config.data.path
    if connector is not None and not connector.on_disk:
        logs = None
    _check_places(config.store, logs, pods)


def cron_times(text: str) -> list[tuple[int, int]]:
    """Return the (hour, minute) of every start within a day by the cron schedule ``text``."""
    minutes, hours = (_expanded(field, last) for field, last in zip(text.split()[:2], (59, 23), strict=True))
    return [(hour, minute) for hour in hours for minute in minutes]


def _expanded(field: str, last: int) -> list[int]:
    # Return the numbers from 0 to ``last`` that match a field of a cron schedule.
    numbers: set[int] = set()
    for part in field.split(","):
        match = CRON_PART.fullmatch(part)
        if match is None:
            continue
        low, high, step = match.groups()
        # In cron, 5 means just 5, but 5/10 means every tenth value from 5 to the end of the field.
        end = last
        if high:
            end = int(high)
        elif low and not step:
            end = int(low)
        numbers.update(range(int(low or 0), end + 1, int(step or 1)))
    return sorted(numbers)


def _cron_problem(text: str) -> str:
    # Return what a schedule must be, or "" if ``text`` is valid. The API server would refuse it only when it is
    # applied.
    fields = text.lower().split()
    if len(fields) != len(CRON_FIELDS):
        return f"five fields: {' '.join(CRON_FIELDS)}"
    for (name, (low, high, words)), field in zip(CRON_FIELDS.items(), fields, strict=True):
        numbers = dict(zip(words, range(low, high + 1), strict=False))
        for part in field.split(","):
            # A part is *, a value or a rising range. Unknown words become -1, which lies outside of every field.
            match = CRON_PART.fullmatch(part)
            ends = []
            for end in match.groups()[:2] if match else ():
                if end and end.isdigit():
                    ends.append(int(end))
                elif end:
                    ends.append(numbers.get(end, -1))
            if match is None or ends != sorted(ends) or any(not low <= end <= high for end in ends):
                return f"as {name} {low} to {high}, a range of these, a list of both, or *, with /step if need be"
    return ""


def _check_names(launch: LaunchConfig, schedule: ScheduleConfig) -> None:
    # Raise ConfigError for a name that the API server would refuse. Pods that name no account get the namespace's
    # ``default``.
    pods = launch.pods
    names = [
        ("launch.namespace", launch.namespace),
        ("launch.queue", launch.queue),
        ("schedule.name", schedule.name),
        ("launch.pods.service_account", pods.service_account or "default"),
        ("launch.pods.launcher_account", pods.launcher_account or "default"),
        *((f"launch.pods.volumes.{name}", name) for name in pods.volumes),
        *((f"launch.pods.volumes.{name}.claim", volume.claim) for name, volume in pods.volumes.items()),
        *(("launch.pods.env_from", name) for name in pods.env_from),
        *(("launch.pods.pull_secrets", name) for name in pods.pull_secrets),
    ]
    for path, name in names:
        if not LABEL.fullmatch(name):
            good = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63] or "nightjar"
            raise ConfigError(f"{path} is {name!r}, expected up to 63 of a-z, 0-9 and '-'", hint=f"{path}={good}")


def _check_hosts(launch: LaunchConfig, hardware: HardwareConfig) -> None:
    # Check ``launch.min_hosts``, ``launch.shrink_after_minutes`` and ``launch.grow``.
    hosts = hardware.hosts
    if launch.min_hosts is None:
        if launch.grow:
            raise ConfigError(
                "launch.grow takes back hosts that a run gave up, but with launch.min_hosts=null it gives none up",
                hint="launch.min_hosts=1, or launch.grow=false",
            )
        return
    if launch.min_hosts > hosts:
        raise ConfigError(
            f"launch.min_hosts is {launch.min_hosts}, expected at most the {hosts} of hardware={hardware.name}",
            hint=f"launch.min_hosts={hosts}, or null",
        )
    # Shrinking must come first, because the stage fails for lack of hosts once these limits are reached.
    for name in ("pending_minutes", "rendezvous_minutes"):
        if launch.shrink_after_minutes >= getattr(launch, name):
            raise ConfigError(
                f"launch.shrink_after_minutes is {launch.shrink_after_minutes:g}, expected less than launch.{name}="
                f"{getattr(launch, name):g}, at which a stage fails",
                hint=f"launch.{name}={2 * launch.shrink_after_minutes:g}",
            )


def _check_embedding(launch: LaunchConfig, hardware: HardwareConfig) -> None:
    # Embedding hosts are pods of another kind in the same job, and their number is fixed.
    if not hardware.embedding_hosts:
        return
    if launch.job == "indexed":
        raise ConfigError(
            f"hardware.embedding_hosts is {hardware.embedding_hosts}, but launch.job=indexed has pods of one kind",
            hint="launch.job=volcano or launch.job=jobset",
        )
    if launch.min_hosts is not None:
        raise ConfigError(
            f"launch.min_hosts is {launch.min_hosts}, but with hardware.embedding_hosts={hardware.embedding_hosts} a "
            "run keeps its hosts: which kind of host is missing is not known",
            hint="launch.min_hosts=null, or hardware.embedding_hosts=0",
        )


def _check_pods(pods: PodConfig) -> None:
    known = (*STAGES.names(), LAUNCHER, EMBEDDING)
    for stage, resources in pods.resources.items():
        if stage not in known:
            raise ConfigError(
                f"launch.pods.resources names {stage!r}, expected some of: {', '.join(known)}",
                hint=f"~launch.pods.resources.{stage}",
            )
        # /dev/shm is memory, and files there count towards the pod's limit.
        if resources.cpu <= 0 or resources.memory_gib <= resources.shm_gib or resources.disk_gib <= 0:
            raise ConfigError(
                f"launch.pods.resources.{stage} asks for {resources.cpu:g} cores, {resources.memory_gib:g} GiB of "
                f"memory with {resources.shm_gib:g} GiB of /dev/shm in it and {resources.disk_gib:g} GiB of disk, "
                "expected more than 0 of each, and more memory than /dev/shm",
                hint=f"launch.pods.resources.{stage}={{cpu:2,memory_gib:8,shm_gib:1,disk_gib:20}}",
            )
    for name in (*pods.env, *pods.secret_env):
        if not VARIABLE.fullmatch(name):
            valid = re.sub(r"[^A-Za-z0-9_]", "_", name)
            raise ConfigError(
                f"{name!r} is no name of a variable, expected letters, digits and '_'",
                hint=f"launch.pods.env={{{valid}:..}}",
            )
    for name, reference in pods.secret_env.items():
        if not SECRET_KEY.fullmatch(reference):
            raise ConfigError(
                f"launch.pods.secret_env.{name} is not <secret>/<key>, a secret's name and a key in it",
                hint=f"launch.pods.secret_env.{name}=<secret>/<key>",
            )
    for toleration in pods.tolerations:
        if toleration.operator not in ("Exists", "Equal") or toleration.effect not in EFFECTS:
            raise ConfigError(
                f"the toleration of {toleration.key!r} has operator {toleration.operator!r} and effect "
                f"{toleration.effect!r}, expected Exists or Equal, and none or {', '.join(EFFECTS[1:])}",
                hint=f"launch.pods.tolerations=[{{key:{toleration.key},operator:Exists}}]",
            )


def _check_patch(pods: PodConfig) -> None:
    # Raise ConfigError for a fragment that names no stage or is not a mapping; the API server checks its content.
    known = (PATCH_ALL, *STAGES.names(), LAUNCHER, EMBEDDING)
    for name, fragment in pods.patch.items():
        if name not in known:
            raise ConfigError(
                f"launch.pods.patch names {name!r}, expected some of: {', '.join(known)}",
                hint=f"~launch.pods.patch.{name}, or launch.pods.patch.{PATCH_ALL}=..",
            )
        if not isinstance(fragment, dict) or not {*fragment} <= {"metadata", "spec"}:
            raise ConfigError(
                f"launch.pods.patch.{name} is {fragment!r}, expected metadata and spec of a pod",
                hint=f"launch.pods.patch.{name}={{spec:{{runtimeClassName:nvidia}}}}",
            )


def _check_places(store: str, logs: str | None, pods: PodConfig) -> None:
    # The store and the logs must be visible to every pod. The trailing slash keeps /mnt/nightjar-old from matching the
    # volume /mnt/nightjar.
    volumes = [volume.path.rstrip("/") + "/" for volume in pods.volumes.values()]
    for path, place in (("store", store), ("data.path", logs)):
        if place is None or ("://" in place and not place.startswith("file://")):
            continue
        if not any(f"{place.removeprefix('file://')}/".startswith(volume) for volume in volumes):
            raise ConfigError(
                f"{path} is {place!r}, a folder of this machine, which pods do not see",
                hint=f"{path}=s3://.., or a folder on a volume: "
                f"launch.pods.volumes={{store:{{claim:<claim>,path:/mnt/nightjar}}}} {path}=/mnt/nightjar/..",
            )
