"""``partition.auto``: chooses flat or towers, their number, module and width, by predicted step and held-out NE.

Candidates are priced by the plans of their tower hosts, which trains nothing. Those that are faster than flat are then
tried, the fastest first, until one keeps the NE (``training/tower_trial.py``).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.config.plan import PartitionConfig
from pipeline.core.errors import ConfigError, GuardError, PlanError
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.towers import TowerCandidate, TowerChoice, TowerModuleSpec, Towers
from pipeline.stages.stage_inputs import add_crossing, plan_groups, refine_plan
from pipeline.stages.tower_assignment import ComparedFeatures, compare_features
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.planning.inputs import PlanInputs
    from pipeline.towers.layout import TowerLayout
    from pipeline.training.tower_trial import HeldOutLosses

log = logging.getLogger(__name__)
# The modules that may keep the quality at a fraction of the bytes (docs/measurements/towers.md).
MODULES = ("dcn_low_rank", "low_rank")
# Widths of a tower's vectors, as parts of the embeddings' width. A whole one saves nothing.
PARTS = (8, 4, 2)
# A candidate must be predicted to save this share of flat's step: predictions are off by some per cent, and towers are
# more to operate.
LEAST_GAIN = 0.05
# The most candidates that are tried: both modules and all widths of one number of towers, so that the widest, which
# keep the NE best, have their turn after the fastest. Each takes a training of ``partition.probe_steps`` steps.
MOST_TRIALS = 6
# The one-sided 95 % quantile of the normal distribution.
UPPER_END = 1.645
# The bytes of an id on its way, and of a float32 value with its gradient on the way back.
ID_BYTES, VALUE_BYTES = 4, 8


@dataclass
class PricedTowers:
    """A candidate's record; its towers, and the plan of their hosts, where they could be planned."""

    record: TowerCandidate
    towers: Towers | None = None
    plan: Plan | None = None

    def note(self, **fields: Any) -> None:
        """Replace ``fields`` of the record."""
        self.record = dataclasses.replace(self.record, **fields)


class TowerChooser:
    """Chooses between the flat model and towers for one dataset on one hardware.

    Args:
        config: The configuration, with the measured figures of the hardware.
        flat: The flat plan.
    """

    def __init__(
        self, config: Config, store: Store, dataset: Artifact, schema: DatasetSchema, profile: Profile, flat: Plan
    ) -> None:
        self.config, self.store, self.dataset = config, store, dataset
        self.schema, self.profile, self.flat = schema, profile, flat
        self.source = ""

    def choose(self) -> tuple[Towers, Plan | None]:
        """Choose, and record among what.

        Returns:
            The towers, and the plan of their hosts; None if the flat model is chosen.

        Raises:
            ConfigError: The features cannot be compared or divided.
            GuardError: The probe or the flat model's trial diverged.
        """
        hosts, flat_ms = self.config.hardware.hosts, self.flat.predicted_step_ms
        if hosts == 1:
            return self._flat([], "on one host nothing crosses a network that towers could relieve")
        candidates = self._price()
        fast = [each for each in candidates if self._is_fast(each)]
        if not fast:
            why = f"no towers are predicted to save {LEAST_GAIN:.0%} of the flat model's {flat_ms:.3f} ms"
            return self._flat(candidates, why)
        chosen, why = self._try(fast)
        if chosen is None:
            return self._flat(candidates, why)
        assert chosen.towers is not None
        return dataclasses.replace(chosen.towers, choice=self._record(candidates, why, chosen)), chosen.plan

    def _price(self) -> list[PricedTowers]:
        # Returns the candidates in the order of their predicted steps, those that cannot be planned at the end.
        from pipeline.towers.assignment import tower_counts

        counts = tower_counts(self.config.partition, self.config.hardware.hosts)
        compared = compare_features(self.config, self.store, self.dataset, self.schema, self.flat, counts)
        candidates = []
        for count in counts:
            candidates += self._price_count(compared, count)
        return sorted(candidates, key=lambda each: each.record.predicted_step_ms or float("inf"))

    def _price_count(self, compared: ComparedFeatures, count: int) -> list[PricedTowers]:
        # Returns the candidates with ``count`` towers. Where tables lie depends on the towers' features, and hardly on
        # their modules. So hosts are planned once, and with modules only for candidates that are tried.
        from pipeline.towers.assignment import towers_of
        from pipeline.towers.layout import layout_of

        config, schema, hardware = self.config, self.schema, self.config.hardware
        assigned, evidence = compared.divide(count)
        layouts = []
        for options in module_options(config):
            towers = towers_of(options, config.model.embedding_dim, hardware.hosts, assigned, schema.vectors)
            towers = dataclasses.replace(towers, evidence=evidence)
            layouts.append(layout_of(towers, schema.vectors, hardware.hosts, hardware.ranks_per_host))
        groups: list[tuple[PlanInputs, Plan]] = []
        problem = ""
        try:
            groups = plan_groups(config, schema, self.profile, layouts[0], self.dataset.key, with_modules=False)
        except (PlanError, ConfigError) as error:
            # The tables of a tower may not fit its hosts.
            problem = error.message.splitlines()[0]
        return [self._price_layout(layout, groups, problem) for layout in layouts]

    def _price_layout(
        self, layout: TowerLayout, groups: Sequence[tuple[PlanInputs, Plan]], problem: str
    ) -> PricedTowers:
        # Returns a candidate whose hosts are planned as ``groups``; ``problem``: why they could not be, else "".
        towers = layout.towers
        crossing = self._crossing_bytes(len(layout.vectors), towers.module.dim, len(layout.tower_hosts))
        record = TowerCandidate(
            towers=len(towers.towers), module=towers.module, bytes_per_sample=crossing, verdict=problem
        )
        candidate = PricedTowers(record)
        if problem:
            return candidate
        try:
            plan = add_crossing(self.config, self.schema, self.profile, layout, groups)
        except (PlanError, ConfigError) as error:
            # The ranking model may refuse vectors of this width.
            candidate.note(verdict=error.message.splitlines()[0])
            return candidate
        step = plan.predicted_step_ms
        candidate.note(predicted_step_ms=step, ratio=step / self.flat.predicted_step_ms)
        candidate.towers = towers
        return candidate

    def _is_fast(self, candidate: PricedTowers) -> bool:
        ratio = candidate.record.ratio
        if ratio is None:
            return False
        if ratio > 1 - LEAST_GAIN:
            candidate.note(verdict=f"saves less than {LEAST_GAIN:.0%} of the step")
            return False
        candidate.note(verdict="not tried")
        return True

    def _try(self, fast: Sequence[PricedTowers]) -> tuple[PricedTowers | None, str]:
        # Returns the first of ``fast`` whose NE is kept, None if there is none among those that are tried, and why.
        from pipeline.training.config_settings import select_training_settings
        from pipeline.training.tower_trial import run_trial, trial_length

        settings, limit = select_training_settings(self.config), self.config.partition.max_ne_loss
        length = trial_length(settings, self.schema.rows.get("train", 0))
        if not length.held:
            return None, "the dataset has too few train rows to hold some out and compare NE"

        def trial(what: str, towers: Towers | None) -> HeldOutLosses:
            log.info("partition.auto: trying %s, %s", what, length.text)
            began = time.monotonic()
            losses = run_trial(settings, self.store, self.dataset, towers, length)
            log.info("partition.auto: tried %s in %.1f s", what, time.monotonic() - began)
            return losses

        flat, tried = None, 0
        for candidate in fast[:MOST_TRIALS]:
            if not self._plan(candidate):
                continue
            self.source = f"trials of {length.text}"
            # The flat model is tried only where it is compared with something.
            flat, tried = flat or trial("the flat model", None), tried + 1
            record = candidate.record
            try:
                losses = trial(f"{record.label} ({record.ratio:.0%} of flat's step)", candidate.towers)
            except GuardError as error:
                candidate.note(verdict=error.message)
                continue
            change = self._compare(candidate, flat, losses)
            if change is not None:
                return candidate, f"{record.label}: {record.ratio:.0%} of flat's step, NE {change} % against flat's"
        if not tried:
            return None, f"of {len(fast)} faster candidates, none fits its hosts with its module and stays faster"
        return None, f"{tried} of {len(fast)} faster candidates were tried, and none keeps NE within {limit:g} %"

    def _plan(self, candidate: PricedTowers) -> bool:
        # Plans the hosts of a candidate's towers with the memory of its module; returns whether it fits and is fast.
        assert candidate.towers is not None
        try:
            candidate.plan = refine_plan(self.config, self.schema, self.profile, candidate.towers, self.dataset.key)
        except PlanError as error:
            log.info("partition.auto: %s, with its module: %s", candidate.record.label, error.message)
            candidate.note(verdict="does not fit its hosts with its module")
            return False
        step = candidate.plan.predicted_step_ms
        candidate.note(predicted_step_ms=step, ratio=step / self.flat.predicted_step_ms)
        return self._is_fast(candidate)

    def _compare(self, candidate: PricedTowers, flat: HeldOutLosses, losses: HeldOutLosses) -> str | None:
        # Records the change of NE; returns it as text if the upper end of its interval is within the limit.
        from pipeline.training.tower_trial import ne_change

        change, error = ne_change(flat, losses)
        upper, limit = change + UPPER_END * error, self.config.partition.max_ne_loss
        kept = upper <= limit
        verdict = "chosen" if kept else f"NE may rise by {upper:.2f} %"
        candidate.note(ne_change=round(change, 6), ne_error=round(error, 6), verdict=verdict)
        text = f"{change:+.2f} ± {error:.2f}"
        log.info("partition.auto: NE %s %% against flat's: %s", text, verdict)
        return text if kept else None

    def _flat(self, candidates: Sequence[PricedTowers], why: str) -> tuple[Towers, None]:
        from pipeline.towers.assignment import flat_towers

        towers = flat_towers(self.config.hardware.hosts, [column.name for column in self.schema.sparse])
        return dataclasses.replace(towers, choice=self._record(candidates, why)), None

    def _record(self, candidates: Sequence[PricedTowers], why: str, chosen: PricedTowers | None = None) -> TowerChoice:
        dim = self.config.model.embedding_dim
        flat = TowerCandidate(
            towers=0,
            module=TowerModuleSpec(dim=dim),
            predicted_step_ms=self.flat.predicted_step_ms,
            ratio=1.0,
            bytes_per_sample=self._crossing_bytes(len(self.schema.vectors), dim, self.config.hardware.hosts),
            verdict="" if chosen is not None else "chosen",
        )
        return TowerChoice(
            max_ne_loss=self.config.partition.max_ne_loss,
            candidates=(flat, *(each.record for each in candidates)),
            chosen=0 if chosen is None else 1 + candidates.index(chosen),
            why=why,
            source=self.source,
        )

    def _crossing_bytes(self, vectors: int, width: int, groups: int) -> float:
        # Returns what a sample sends between ``groups`` of hosts: ids with their lengths, vectors and their gradients.
        ids = sum(1 + self.profile.sparse[column.name].pooling for column in self.schema.id_columns)
        return (1 - 1 / groups) * (ID_BYTES * ids + VALUE_BYTES * vectors * width)


def module_options(config: Config) -> list[PartitionConfig]:
    """Return ``partition`` with each module and width to choose among; those that it sets itself are the only ones."""
    partition, dim = config.partition, config.model.embedding_dim
    # Towers that pass embeddings through are never faster than flat, so this module, the default, leaves the choice.
    modules = MODULES if partition.module == "pass_through" else (partition.module,)
    widths = [partition.dim] if partition.dim else sorted({max(1, dim // part) for part in PARTS})
    options = []
    for module in modules:
        for width in widths:
            options.append(dataclasses.replace(partition, module=module, dim=width))
    return options
