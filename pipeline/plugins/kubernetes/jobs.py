"""Stages as jobs of a cluster: found again after a crash, submitted, followed, diagnosed and ended."""

from __future__ import annotations

import copy
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from pipeline.config import Config
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LaunchError
from pipeline.launch.appdefs import hosts_of
from pipeline.launch.elastic import NoRoomError, allowed_pending_minutes, fewest_hosts
from pipeline.launch.protocol import GivenUpError
from pipeline.plugins.kubernetes.api_client import Api, Object, RefusedError
from pipeline.plugins.kubernetes.capacity_probe import ASKING_SECONDS, JobRoom, as_room, room_of
from pipeline.plugins.kubernetes.diagnosis import death, is_alive, is_lost, job_problem, pending_problem
from pipeline.plugins.kubernetes.pod_templates import ATTEMPT_LABEL, RUN_LABEL, job_name, run_label, stage_query
from pipeline.plugins.kubernetes.podlogs import PodLogs
from pipeline.records.runs import Step

MOST_ATTEMPTS = 999
SUBMISSION = "nightjar/submission"  # annotation: which request made the job, in case its answer is lost
BRISK_SECONDS = 5.0  # time limit for a request that a user waits for after Ctrl-C
log = logging.getLogger(__name__)


class ClusterRunner(ABC):
    """Submits stages as jobs; subclasses decide how a job looks and is made.

    Clocks and rights were checked when the run was locked (``locks.py``).
    """

    outlasts = True
    poll_seconds = 1.0
    # The API path of the jobs, with {namespace} in it.
    collection: str
    # Builds the job of an attempt from the configuration, step, name, attempt, and URL of the configuration in the
    # store.
    build: staticmethod[[Config, Step, str, int, str], Object]
    # The pod label whose value is the job's name.
    pod_label: str

    def __init__(self, config: Config, api: Api, clock: Clock = CLOCK) -> None:
        self.config, self.api, self.clock = config, api, clock
        self.namespace = config.launch.namespace
        self.jobs = self.collection.format(namespace=self.namespace)
        self._followed: list[ClusterJob] = []
        self._lent: dict[str, Step] = {}  # the stages for which room was requested

    @abstractmethod
    def phase_of(self, job: Object) -> str:
        """Return running | succeeded | failed | cancelled, by the status of the object ``job``."""

    def complete(self, step: Step, job: Object) -> None:  # noqa: B027 (most jobs need nothing else)
        """Make what the pods of the live ``job`` need beside it, if it is missing."""

    def phase(self, name: str) -> str:
        """Return running | succeeded | failed | cancelled | lost; lost: the server has no job of that name."""
        job = self.api.find(f"{self.jobs}/{name}")
        if job is None:
            return "lost"
        return self.phase_of(job)

    def delete(self, name: str) -> None:
        """Delete the job with its pods; no error if there is none."""
        self.api.delete(f"{self.jobs}/{name}")

    def expect(self, steps: Sequence[Step]) -> None:  # noqa: B027 (concrete, and the same for all of them)
        """Do nothing: a job takes its place in the cluster when its stage starts."""

    def takes(self, stage: str) -> bool:
        """Return False: a pod takes longer to start than an import."""
        return False

    def goes_on(self) -> bool:
        """Return whether a job of the run, or a pod of one, has not ended. The API server is asked once."""
        # Ask without retries: the run has ended, and its launcher should end as well.
        api, ours = self.api.brisk(BRISK_SECONDS), f"{RUN_LABEL}={run_label(str(self.config.run))}"
        for job in api.get(self.jobs, labelSelector=ours).get("items", []):
            if self.phase_of(job) == "running" and "deletionTimestamp" not in job["metadata"]:
                return True
        # Pods outlive a deleted job by their grace period, and even longer on a lost node.
        pods = api.get(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=ours).get("items", [])
        return any(map(is_alive, pods))

    def find(self, step: Step) -> ClusterJob | None:
        """Return the job of ``step`` that runs, submitted by a launcher that is gone.

        Jobs of the same run and stage but another key, or another image, are ended: they would write to the same
        checkpoints. So is one that holds room for the stage.
        """
        if self.config.launch.grow:
            self._give_back(step, self.api)
        running: ClusterJob | None = None
        for job in self.api.get(self.jobs, labelSelector=stage_query(self.config, step)).get("items", []):
            name, attempt = job["metadata"]["name"], int(job["metadata"]["labels"].get(ATTEMPT_LABEL, "0"))
            if "deletionTimestamp" in job["metadata"] or self.phase_of(job) != "running":
                continue
            if name == job_name(self.config, step, attempt):
                self.complete(step, job)  # its launcher may have died before it did this
                running = self._follow(step, name)
                log.info("%-10s attached to job %s, which runs already", step.name, name)
            else:
                log.info("%-10s job %s of other settings is ended", step.name, name)
                self.delete(name)
                # The job's pods may write to the same checkpoints until the last of them is gone.
                last = self.clock.monotonic() + 60 * self.config.launch.pending_minutes
                while self.api.find(f"{self.jobs}/{name}") is not None or self.pods(name):
                    if self.clock.monotonic() > last:
                        hint = f"kubectl describe job {name}"
                        raise LaunchError(f"job {name} of other settings does not end", hint=hint)
                    self.clock.sleep(self.poll_seconds)
        return running

    def submit(self, step: Step, config_url: str) -> ClusterJob:
        """Create the job of the first attempt whose name is free, once no pod of an earlier one runs."""
        self._await_end(step)
        build = type(self).build
        job = self._create(step, lambda name, attempt: build(self.config, step, name, attempt, config_url), self.api)
        # A launcher that dies before this line leaves a job without what its pods need; ``find`` completes it, too.
        self.complete(step, job)
        name = job["metadata"]["name"]
        log.info("%-10s job %s in namespace %s", step.name, name, self.namespace)
        return self._follow(step, name)

    def room(self, step: Step, hosts: int) -> JobRoom:
        """Create a job of the stage's shape whose pods wait, one for each of ``hosts``."""
        # Record this before the request, whose answer may be lost, so that ``close`` gives the room back in any case.
        self._lent[step.name] = step
        # Copy the runner, so that the job is built for ``hosts`` hosts and the run keeps its own number of hosts.
        lent = copy.copy(self)
        lent.config = replace(self.config, hardware=replace(self.config.hardware, hosts=hosts))
        build = type(self).build
        job = lent._create(
            room_of(step),
            lambda name, attempt: as_room(build(lent.config, step, name, attempt, ""), step),
            self.api.brisk(ASKING_SECONDS),
        )
        name, pods = job["metadata"]["name"], f"/api/v1/namespaces/{self.namespace}/pods"
        path, selector = f"{self.jobs}/{name}", f"{self.pod_label}={name}"
        return JobRoom(self.api, path, lambda job: self.phase_of(job) == "running", pods, selector)

    def _give_back(self, step: Step, api: Api) -> None:
        # The room may be left over from a launcher that is gone, or from a request whose answer was lost.
        for job in api.get(self.jobs, labelSelector=stage_query(self.config, room_of(step))).get("items", []):
            api.delete(f"{self.jobs}/{job['metadata']['name']}")

    def _create(self, step: Step, manifest: Callable[[str, int], Object], api: Api) -> Object:
        """Create the job of the first attempt whose name does not belong to a job that ended, or is being deleted."""
        for attempt in range(1, MOST_ATTEMPTS):
            name, submission = job_name(self.config, step, attempt), uuid.uuid4().hex
            job = manifest(name, attempt)
            job["metadata"]["annotations"] = {**job["metadata"].get("annotations", {}), SUBMISSION: submission}
            try:
                return api.create(self.jobs, job)
            except RefusedError as error:
                if error.status != 409:
                    raise
            live = api.find(f"{self.jobs}/{name}")
            if live is None:
                continue
            # Either this very request made the job and its answer was lost, or another one did and the job still runs.
            if (live["metadata"].get("annotations") or {}).get(SUBMISSION) == submission:
                return live
            if "deletionTimestamp" not in live["metadata"] and self.phase_of(live) == "running":
                return live
        raise LaunchError(f"{MOST_ATTEMPTS} jobs of stage {step.name} lie in the cluster", hint="launch.keep_hours=1")

    def _await_end(self, step: Step) -> None:
        """Wait until no pod of an earlier attempt runs: it would write to the same checkpoints. LaunchError if late."""
        labels, path = stage_query(self.config, step), f"/api/v1/namespaces/{self.namespace}/pods"
        last = self.clock.monotonic() + 60 * self.config.launch.pending_minutes
        while True:
            alive = next(filter(is_alive, self.api.get(path, labelSelector=labels).get("items", [])), None)
            if alive is None:
                return
            if self.clock.monotonic() > last:
                name = alive["metadata"]["name"]
                raise LaunchError(
                    f"pod {name} of an earlier attempt does not end (after launch.pending_minutes="
                    f"{self.config.launch.pending_minutes:g})",
                    hint=f"kubectl --namespace {self.namespace} describe pod {name}",
                )
            self.clock.sleep(self.poll_seconds)

    def _follow(self, step: Step, name: str) -> ClusterJob:
        self._followed.append(ClusterJob(self, step, name))
        return self._followed[-1]

    def pods(self, name: str) -> list[Object]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return list(self.api.get(path, labelSelector=f"{self.pod_label}={name}").get("items", []))

    def close(self) -> None:
        """Follow no logs any more; jobs outlast their launcher, but those that hold room do not."""
        for job in self._followed:
            job.leave()
        # Nobody will use the room any more. If the server does not answer, its pods end by themselves (HOLD_SECONDS).
        for step in self._lent.values():
            with suppress(LaunchError):
                self._give_back(step, self.api.brisk(ASKING_SECONDS))
        self.api.client.close()


class ClusterJob:
    """A stage's job, followed. Its pods may be pending for ``launch.pending_minutes``, by its runner's clock."""

    def __init__(self, runner: ClusterRunner, step: Step, name: str) -> None:
        self.runner, self.step, self.name, self.clock = runner, step, name, runner.clock
        self._logs = PodLogs(runner.api, runner.namespace)
        self._pending_since = self._image_since = self.clock.monotonic()
        self._queued_since: float | None = None
        self._pods: list[Object] = []

    def state(self) -> str:
        """Return the protocol's state. While the API server is silent, wait up to ``launch.outage_minutes``."""
        asked = self.clock.monotonic()
        try:
            job = self.runner.api.find(f"{self.runner.jobs}/{self.name}")
            state = self.runner.phase_of(job) if job is not None else "lost"
            self._pods = self.runner.pods(self.name)
        except LaunchError as error:
            hint = f"job {self.name} goes on; the same command, once the server answers, attaches to it"
            raise LaunchError(error.message, hint=f"{hint}; {error.hint}") from None
        # What pods did while the server was silent is unknown, so that time does not count against them.
        silent = self.clock.monotonic() - asked
        self._pending_since += silent
        self._image_since += silent
        if state == "running" and any(map(is_lost, self._pods)):
            state = "failed"
        self._logs.show(self._pods)
        if state != "running":
            self._logs.finish()
            return state
        if not self._waits_for_admission(job or {}):
            self._check_pending()
            return "running"
        if hosts_of(self.step.name, self.runner.config) > fewest_hosts(self.runner.config):
            self._check_pending()  # fewer hosts may be admitted
        else:
            self._pending_since = self._image_since = self.clock.monotonic()
        return "queued"

    def _waits_for_admission(self, job: Object) -> bool:
        """Return whether ``job`` is suspended until Kueue or another controller admits it; log that once."""
        suspended = bool(job.get("spec", {}).get("suspend"))
        if suspended != (self._queued_since is not None):
            if suspended:
                self._queued_since = self.clock.monotonic()
                queue = self.runner.config.launch.queue
                log.info("%-10s job %s waits for its admission into queue %s", self.step.name, self.name, queue)
            else:
                seconds = self.clock.monotonic() - (self._queued_since or 0.0)
                log.info("%-10s job %s is admitted, after %.0f s", self.step.name, self.name, seconds)
                self._queued_since = None
        return suspended

    def _check_pending(self) -> None:
        """Raise GivenUpError for a pod that cannot start, or does not in time, and NoRoomError if it finds no place.

        A pod may wait less long for a place if the stage may go on with fewer hosts. It has ``launch.image_minutes``
        to get its image.
        """
        config, hosts = self.runner.config, hosts_of(self.step.name, self.runner.config)
        problems = list(filter(None, map(pending_problem, self._pods)))
        now = self.clock.monotonic()
        if not any(problem.image for problem in problems):
            self._image_since = now
        short = len(self._pods) < hosts
        if not problems and not short:
            self._pending_since = now
            return
        no_room = short or any(problem.no_room for problem in problems)
        # A stage that may go on with fewer hosts waits a shorter time for room.
        minutes = allowed_pending_minutes(config, hosts) if no_room else config.launch.pending_minutes
        name = "pending_minutes" if minutes == config.launch.pending_minutes else "shrink_after_minutes"
        late = now - self._pending_since > 60 * minutes
        # Images have their own limit: a new node may take longer to pull one than pods may wait for a place.
        if now - self._image_since > 60 * config.launch.image_minutes:
            late, name, minutes, no_room = True, "image_minutes", config.launch.image_minutes, False
            problems = [problem for problem in problems if problem.image]
        hopeless = any(problem.hopeless for problem in problems)
        if not late and not hopeless:
            return
        if no_room and short:
            job = self.runner.api.find(f"{self.runner.jobs}/{self.name}") or {"metadata": {"name": self.name}}
            problems.append(job_problem(job, config.launch.queue, len(self._pods), hosts, self._warnings()))
        problem = max(problems, key=attrgetter("hopeless", "no_room"))
        hint = problem.hint.replace("<stage>", self.step.name)
        message = f"the {self.step.name} stage does not start: {problem.message}"
        waited = f"{message} (after launch.{name}={minutes:g})"
        if hopeless:
            raise GivenUpError(message, hint=hint)
        if not no_room:
            raise GivenUpError(waited, hint=hint)
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in self._pods)
        raise NoRoomError(waited, hint=hint, running=running)

    def _warnings(self) -> list[str]:
        """Return the controllers' warnings about the job, newest first: no status shows that a quota is full."""
        path, about = f"/api/v1/namespaces/{self.runner.namespace}/events", f"involvedObject.name={self.name}"
        try:
            events = self.runner.api.brisk(BRISK_SECONDS).get(path, fieldSelector=about).get("items", [])
        except LaunchError:
            return []  # events explain, but decide nothing
        # Newer controllers write only ``eventTime``.
        events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), reverse=True)
        return [str(event.get("message", "")) for event in events if event.get("type") == "Warning"]

    def output(self) -> bytes:
        """Return the lines of all pods; only rank 0 of a stage speaks unless something goes wrong."""
        return self._logs.drain()

    def logs(self) -> str:
        return self._logs.text()

    def death(self, logs: str) -> str:
        return death(self._pods, hosts_of(self.step.name, self.runner.config), self.step.name)

    def stop(self, seconds: float) -> None:
        """Delete the job; its pods have their grace time for a checkpoint. Wait until they are gone.

        LaunchError, at once, if the API server does not take the request.
        """
        api, path = self.runner.api.brisk(BRISK_SECONDS), self.runner.jobs.split("/")
        try:
            api.delete(f"{self.runner.jobs}/{self.name}")
        except LaunchError as error:
            command = f"kubectl --namespace {self.runner.namespace} delete {path[-1]}.{path[2]} {self.name}"
            raise LaunchError(error.message, hint=f"{command} ends it") from None
        with suppress(LaunchError):
            last = self.clock.monotonic() + seconds
            while (pods := self.runner.pods(self.name)) and self.clock.monotonic() < last:
                self._logs.show(pods)
                self.clock.sleep(self.runner.poll_seconds)
            self._logs.finish()

    def leave(self) -> None:
        self._logs.leave()

    def cancel(self) -> None:
        """Delete the job if it still runs; a finished job is kept for ``launch.keep_hours``."""
        with suppress(LaunchError):
            if self.runner.phase(self.name) == "running":
                self.runner.delete(self.name)
