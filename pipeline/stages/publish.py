"""Stage publish: the model judged beside the one that serves, and published or held with the reasons.

The way to a verdict: ``release.publish`` writes a version; ``release_gate.judge_version`` scores held-out rows with it
and with the version that serves, on all ranks (``release_ranks`` shares the work out); ``evaluation.gate`` measures
(``measure``), takes a share of the error budget, if there is one (``budget.judge_within_budget``), and decides
(``gate.judge``). ``publishing.promotion`` lets what passes serve. A HOLD becomes exit code 6 in ``Publish.accept``,
once all artifacts are committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from pipeline.config import Config
from pipeline.config.checkpoint import DATA, is_allowed
from pipeline.core.errors import ConfigError, GateHeldError
from pipeline.records.gate import HOLD
from pipeline.records.result import GatePart, ModelPart, Result
from pipeline.records.runs import Step
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

# Limits of the incumbent's figures on today's rows. The incumbent was right when it was published, so a reason that
# names one of them points to labels or traffic, not to the candidate.
_LABEL_LIMITS = ("gate.max_label_shift", "gate.max_ne_drift")


class Publish(Stage):
    """The stage: a version, its verdict, and its promotion."""

    name = "publish"
    help = "compare the model with the serving one, then publish or hold it"
    inputs = ("ingest", "plan", "partition", "train", "evaluate")
    by_default = False
    needs_rows = True
    distributed = True
    # Since revision 1, the version in service is judged on what it would see, or the model is held. Earlier verdicts
    # must not pass for such ones.
    revision = 1
    settings = (
        use("gate", "*"),
        use("evaluate", "group_by"),
        use("publish", "model", named=True),
        use("publish", "quantise judge_beside calibrator.*"),
        use("checkpoint", "allow", named=True),
    )

    def key_settings(self, config: Config) -> dict[str, Any]:
        """Return the settings, the name of the model, and what the log renamed, which the gate takes into account."""
        # Renamed names are added only if there are any, so that all other keys stay those of earlier releases.
        renamed = sorted(name for name in config.checkpoint.allow if is_allowed(name, [DATA]))
        settings = super().key_settings(config) | {"model": config.model_name}
        if renamed:
            settings["checkpoint"] = {"allow": renamed}
        return settings

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        from pipeline.publishing.versions import find_version
        from pipeline.stages.release import covered_incumbent

        if config.publish.judge_beside is not None:
            find_version(store, config.model_name, config.publish.judge_beside)
            return {"incumbent": config.publish.judge_beside}
        if config.data.leave_out:
            # On rows without these features the version in service looks worse than it is, and any model passes.
            raise ConfigError(
                f"data.leave_out has {', '.join(config.data.leave_out)}: a model that was trained without them is "
                "judged only, beside a version that you name",
                hint="publish.judge_beside=<version>; to publish models without them, take them out of data.sparse or "
                "data.dense",
            )
        return {"incumbent": covered_incumbent(config, store, made["train"].key)}

    def modules(self, config: Config) -> tuple[str, ...]:
        # Do not preload what scores a version, since that imports Polars, which has threads.
        return ("pipeline.publishing.program", "pipeline.publishing.served", "pipeline.training.distributed")

    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Write, judge and promote a version, with all ranks; its gate report is the stage's artifact."""
        from pipeline.checkpoint.collectives import this_rank
        from pipeline.stages.release import find_or_judge_version, publish
        from pipeline.stages.release_ranks import join_ranks
        from pipeline.training.distributed import shared_failure

        join_ranks(config)
        with shared_failure():
            if this_rank() != 0:
                find_or_judge_version(config, store, step, inputs)
                return None
            # A held version is committed too; `accept` then ends the run.
            with self.draft(store, step) as draft:
                return draft.commit(publish(config, store, step, inputs, draft))

    def accept(self, artifact: Artifact) -> None:
        gate = GatePart.from_json(artifact.summary["gate"])
        # A quiet setting: the artifact's record has it only where it is set.
        judged_only = "judge_beside" in artifact.config.get("publish", {})
        if gate.verdict != HOLD or judged_only:
            return
        model, message = artifact.config.get("model"), gate.reasons[0]
        if len(gate.reasons) > 1:
            message += f" (and {len(gate.reasons) - 1} more)"
        serving = "nothing is published"
        if gate.incumbent:
            serving = f"{gate.incumbent} keeps serving"
        hint = f"{artifact.path}/gate.html says why. "
        if any(limit in reason for limit, reason in product(_LABEL_LIMITS, gate.reasons)):
            hint += (
                "If the labels of the day are wrong (what ingestion warns of may tell), correct the logs and run the "
                "same command again. "
            )
        # This is for a model that too few rows held. It is not the limit that it was judged by, but one that would do.
        if gate.max_ne_increase is not None:
            limit = f"gate.max_ne_increase={gate.max_ne_increase:g}"
            hint += f"{limit} is the smallest limit that this many rows can test. "
        hint += f"To publish it although it was held: nightjar models promote {model} {gate.version} --reason '...'"
        raise GateHeldError(f"the gate held {gate.version} of model {model}: {message}; {serving}", hint=hint)

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if summary.get("gate"):
            parts["gate"] = GatePart.from_json(summary["gate"])
        if summary.get("model"):
            parts["model"] = ModelPart.from_json(summary["model"])
        return parts

    def lines(self, result: Result) -> dict[str, list[str]]:
        from pipeline.report.stage_figures import gate_lines

        lines = {}
        if result.gate is not None:
            lines["gate"] = gate_lines(result.gate)
        if result.model is not None:
            lines["model"] = [f"version {result.model.version} at {result.model.uri}"]
        return lines


SPEC = Publish()
