"""Stages as jobs of a cluster: found again after a crash, submitted, followed, diagnosed and ended."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.appdefs import hosts_of
from pipeline.launch.kubernetes.api import Api, Object, RefusedError, UnansweredError
from pipeline.launch.kubernetes.diagnosis import Problem, death, job_problem, pending_problem
from pipeline.launch.kubernetes.names import ATTEMPT_LABEL, job_name, selector
from pipeline.launch.kubernetes.podlogs import PodLogs
from pipeline.launch.shrink import NoRoomError, patience
from pipeline.records.step import Step

OUTAGE_SECONDS = 600.0  # that the API server may be silent while a stage runs
MOST_ATTEMPTS = 999
log = logging.getLogger(__name__)


class ClusterRunner(ABC):
    """Submits stages as jobs; how a job looks and is made is a subclass's business.

    Clocks and rights were looked at when the run was taken hold of (``schedulers.py``).
    """

    outlasts = True
    poll_seconds = 1.0
    collection: str  # of the jobs, with {namespace} in it

    def __init__(self, config: Config, api: Api) -> None:
        self.config, self.api = config, api
        self.namespace = config.launch.namespace
        self.jobs = self.collection.format(namespace=self.namespace)
        self._followed: list[ClusterJob] = []

    @abstractmethod
    def create(self, step: Step, name: str, attempt: int, config_url: str) -> None:
        """Create the job; RefusedError with status 409 where there is one of that name."""

    @abstractmethod
    def phase(self, name: str) -> str:
        """running | succeeded | failed | cancelled | lost."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete the job with its pods; no error where there is none."""

    def expect(self, steps: Sequence[Step]) -> None:  # noqa: B027 (concrete, and the same for all of them)
        """Nothing: a job takes its place in the cluster when its stage starts."""

    def takes(self, stage: str) -> bool:
        """No: a pod takes longer than an import."""
        return False

    def find(self, step: Step) -> ClusterJob | None:
        """The job of ``step`` that runs, submitted by a launcher that is gone.

        Jobs of the same run and stage but another key, or another image, are ended: they would write to the same
        checkpoints.
        """
        labels = ",".join(f"{key}={value}" for key, value in selector(self.config, step).items())
        running: ClusterJob | None = None
        for job in self.api.get(self.jobs, labelSelector=labels).get("items", []):
            name, attempt = job["metadata"]["name"], int(job["metadata"]["labels"].get(ATTEMPT_LABEL, "0"))
            if "deletionTimestamp" in job["metadata"] or self.phase(name) != "running":
                continue
            if name == job_name(self.config, step, attempt):
                running = self._follow(step, name)
                log.info("%-10s attached to job %s, which runs already", step.name, name)
            else:
                log.info("%-10s job %s of other settings is ended", step.name, name)
                self._end(name)
        return running

    def _end(self, name: str) -> None:
        self.delete(name)
        last = time.monotonic() + 60 * self.config.launch.pending_minutes
        while self.api.find(f"{self.jobs}/{name}") is not None or self.pods(name):
            if time.monotonic() > last:
                raise LaunchError(f"job {name} of other settings does not end", hint=f"kubectl describe job {name}")
            time.sleep(self.poll_seconds)

    def submit(self, step: Step, config_url: str) -> ClusterJob:
        """Create the job of the first attempt whose name is free."""
        for attempt in range(1, MOST_ATTEMPTS):
            name = job_name(self.config, step, attempt)
            try:
                self.create(step, name, attempt, config_url)
            except RefusedError as error:
                if error.status != 409:
                    raise
                continue  # it ended without its artifact, or is being deleted
            log.info("%-10s job %s in namespace %s", step.name, name, self.namespace)
            return self._follow(step, name)
        raise LaunchError(f"{MOST_ATTEMPTS} jobs of stage {step.name} lie in the cluster", hint="launch.keep_hours=1")

    def _follow(self, step: Step, name: str) -> ClusterJob:
        self._followed.append(ClusterJob(self, step, name))
        return self._followed[-1]

    def pods(self, name: str) -> list[Object]:
        """The pods of a job."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return list(self.api.get(path, labelSelector=self.pod_selector(name)).get("items", []))

    @abstractmethod
    def pod_selector(self, name: str) -> str:
        """What selects the pods of a job."""

    def close(self) -> None:
        """Follow no logs any more; jobs outlast their launcher."""
        for job in self._followed:
            job.leave()
        self.api.client.close()


class ClusterJob:
    """A stage's job, followed. Its pods may be pending for ``launch.pending_minutes``, by this machine's own clock."""

    def __init__(self, runner: ClusterRunner, step: Step, name: str) -> None:
        self.runner, self.step, self.name = runner, step, name
        self._logs = PodLogs(runner.api, runner.namespace)
        self._pending_since = self._heard = time.monotonic()
        self._pods: list[Object] = []

    def state(self) -> str:
        """As the protocol has it. While the API server is silent the stage counts as running, up to ten minutes."""
        try:
            state = self.runner.phase(self.name)
            self._pods = self.runner.pods(self.name)
        except UnansweredError as error:
            silent = time.monotonic() - self._heard
            if silent < OUTAGE_SECONDS:
                return "running"
            raise LaunchError(
                f"{error.message}, for {silent / 60:.0f} minutes; job {self.name} may go on",
                hint="the same command, once it answers, attaches to the job",
            ) from None
        self._heard = time.monotonic()
        self._logs.show(self._pods)
        if state == "running":
            self._check_pending()
        else:
            self._logs.finish()
        return state

    def _check_pending(self) -> None:
        """LaunchError for a pod that never starts, or has not for ``launch.pending_minutes``.

        NoRoomError where there is no place for it; earlier, where the stage may go on with fewer hosts.
        """
        config, hosts = self.runner.config, hosts_of(self.step.name, self.runner.config)
        problems = [problem for pod in self._pods if (problem := pending_problem(pod)) is not None]
        if not problems and len(self._pods) >= hosts:
            self._pending_since = time.monotonic()
            return
        short = len(self._pods) < hosts
        no_room = short or any(problem.no_room for problem in problems)
        minutes = patience(config, hosts) if no_room else config.launch.pending_minutes
        late = time.monotonic() - self._pending_since > 60 * minutes
        if not late and not any(problem.hopeless for problem in problems):
            return
        if short:
            problems.append(self._short_of_pods(hosts))
        problem = max(problems, key=lambda problem: (problem.hopeless, problem.no_room))
        hint = problem.hint.replace("<stage>", self.step.name)
        message = f"the {self.step.name} stage does not start: {problem.message}"
        if problem.hopeless:
            raise LaunchError(message, hint=hint)
        name = "pending_minutes" if minutes == config.launch.pending_minutes else "shrink_after_minutes"
        waited = f"{message} (after launch.{name}={minutes:g})"
        if not no_room:
            raise LaunchError(waited, hint=hint)
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in self._pods)
        raise NoRoomError(waited, hint=hint, running=running)

    def _short_of_pods(self, hosts: int) -> Problem:
        job = self.runner.api.find(f"{self.runner.jobs}/{self.name}") or {"metadata": {"name": self.name}}
        return job_problem(job, self.runner.config.launch.queue, len(self._pods), hosts)

    def output(self) -> bytes:
        """Lines of all pods; only rank 0 of a stage speaks unless something goes wrong."""
        return self._logs.drain()

    def logs(self) -> str:
        """Of every pod that started."""
        return self._logs.text()

    def death(self, logs: str) -> str:
        """The killed pod, in words."""
        return death(self._pods, hosts_of(self.step.name, self.runner.config), self.step.name)

    def stop(self, seconds: float) -> None:
        """Delete the job; its pods have their grace time for a checkpoint. Wait until they are gone."""
        with suppress(LaunchError):
            self.runner.delete(self.name)
            last = time.monotonic() + seconds
            while (pods := self.runner.pods(self.name)) and time.monotonic() < last:
                self._logs.show(pods)
                time.sleep(self.runner.poll_seconds)
            self._logs.finish()

    def leave(self) -> None:
        """Follow it no more."""
        self._logs.leave()

    def cancel(self) -> None:
        """Delete the job where it still runs; a finished one stays to be looked at for ``launch.keep_hours``."""
        with suppress(LaunchError):
            if self.runner.phase(self.name) == "running":
                self.runner.delete(self.name)
