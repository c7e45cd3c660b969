"""What Optuna is asked: the settings of the next trial, whether a trial goes on, which settings matter.

An Optuna study is rebuilt in memory from the records for every question, so nothing has to be kept but the records.
Random numbers are drawn by (seed, number of the trial): a study that goes on proposes nothing twice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipeline.config.tuning import TuneConfig
from pipeline.core.errors import ConfigError
from pipeline.plugins.tuning.space import held, rounded
from pipeline.records.study import DONE, PRUNED, TRYING, Dimension, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

FAR = 2**62  # samples that no trial reaches
_RUNGS = "completed_rung_"  # Optuna's successive halving stores a trial's value at a rung under this name
_SEEDS = 2**32


def optuna() -> ModuleType:
    """Import Optuna, which then logs only problems; ConfigError if it is not installed."""
    try:
        import optuna as module
    except ImportError:
        raise ConfigError(
            "nightjar tune needs Optuna, which is not installed", hint="pip install 'nightjar[tune]'"
        ) from None
    module.logging.set_verbosity(module.logging.WARNING)
    warnings.filterwarnings("ignore", category=module.exceptions.ExperimentalWarning)
    # Optuna warns with few finished trials.
    warnings.filterwarnings("ignore", message="Target and region quantiles select the same")
    return module


def proposal(
    space: Mapping[str, Dimension],
    trials: Sequence[TrialRecord],
    config: TuneConfig,
    number: int,
    earlier: Sequence[TrialRecord] = (),
) -> dict[str, Any]:
    """Return the settings of trial ``number``. ``earlier``: trials of another study that inform it."""
    module = optuna()
    kinds: dict[str, Any] = {"tpe": module.samplers.TPESampler, "random": module.samplers.RandomSampler}
    # Use another seed for each number: the sampler is made anew for every trial, and would draw the same values again.
    sampler = kinds[config.sampler](seed=(config.seed * 1_000_003 + number) % _SEEDS)
    study = module.create_study(sampler=sampler)
    for trial in [*earlier, *trials]:
        # The study of a warm start may have searched a wider space, and Optuna refuses values outside this one.
        if all(held(dimension, trial.parameters.get(key)) is not None for key, dimension in space.items()):
            study.add_trial(_frozen(module, trial, space))
    asked = study.ask(_distributions(module, space)).params
    return {key: rounded(dimension, asked[key]) for key, dimension in space.items()}


def decided(
    space: Mapping[str, Dimension],
    trials: Sequence[TrialRecord],
    config: TuneConfig,
    number: int,
    rows: int,
    samples_total: int,
) -> tuple[bool, TrialRecord]:
    """Return whether trial ``number`` ends after its last look, and its record with the rungs that it has reached.

    ``rows``: the rows of an epoch; ``samples_total``: the samples of the longest training.
    """
    module = optuna()
    pruner = _pruner(module, config, rows, samples_total)
    # Hyperband assigns a trial to a bracket by a hash of the study's name and the trial's number. Without a name Optuna
    # makes a random one, and a trial would be in another bracket at every look.
    study = module.create_study(study_name="study")
    numbers = []
    for trial in trials:
        study.add_trial(_frozen(module, trial, space))
        numbers.append(trial.number)
    at = numbers.index(number)
    ends = bool(pruner.prune(study, study.get_trials(deepcopy=False)[at]))
    # The pruner notes the rungs that it has judged in this study, which is discarded, so the record keeps them.
    rungs = {}
    for key, value in study.get_trials()[at].system_attrs.items():
        if key.startswith(_RUNGS):
            rungs[key.removeprefix(_RUNGS)] = value
    record = replace(trials[at], rungs=rungs or None)
    return ends, replace(record, asks_at=next_rung(config, rows, record.looks[-1].samples))


def next_rung(config: TuneConfig, rows: int, samples: int) -> int:
    """Return the samples of the first rung beyond ``samples``; ``FAR`` where nothing ends trials early."""
    if config.pruner == "none":
        return FAR
    # Successive halving decides at the first rung times the powers of the factor. It decides nothing between two rungs,
    # so the trial need not wait for an answer there.
    rung = first_rung(config, rows)
    while rung <= samples:
        rung *= config.reduction
    return rung


def first_rung(config: TuneConfig, rows: int) -> int:
    """Return the samples that every trial trains."""
    return max(1, math.floor(config.min_epochs * rows))


def importance(space: Mapping[str, Dimension], trials: Sequence[TrialRecord]) -> dict[str, float] | None:
    """Return the share by which each setting decides whether a trial is among the best (PED-ANOVA, IJCAI 2023).

    Shares sum to 1. None with fewer than two finished trials.
    """
    finished = [each for each in trials if each.state == DONE and each.ne is not None]
    if len(finished) < 2:
        return None
    module = optuna()
    study = module.create_study()
    for trial in finished:
        study.add_trial(_frozen(module, trial, space))
    # The share of the trials that count as the best: five of them, but at least a tenth and at most half.
    quantile = max(0.1, min(0.5, 5 / len(finished)))
    evaluator = module.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    shares = module.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in sorted(shares.items(), key=lambda item: -item[1])}


def _pruner(module: ModuleType, config: TuneConfig, rows: int, samples_total: int) -> Any:
    # Optuna's resources and the steps of its intermediate values are samples here.
    first = first_rung(config, rows)
    if config.pruner == "asha":
        return module.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=config.reduction)
    if config.pruner == "hyperband":
        # If the longest training were shorter than the first rung, Hyperband would have no bracket and divide by 0.
        most = max(samples_total, first)
        return module.pruners.HyperbandPruner(min_resource=first, max_resource=most, reduction_factor=config.reduction)
    return module.pruners.NopPruner()


def _frozen(module: ModuleType, trial: TrialRecord, space: Mapping[str, Dimension]) -> FrozenTrial:
    states = module.trial.TrialState
    known = {DONE: states.COMPLETE, PRUNED: states.PRUNED, TRYING: states.RUNNING}
    rungs = trial.rungs or {}
    frozen: FrozenTrial = module.trial.create_trial(
        state=known.get(trial.state, states.FAIL),
        # A pruned trial has an NE too, but samplers judge it by the last of its intermediate values.
        value=trial.ne if trial.state == DONE else None,
        params={key: trial.parameters[key] for key in space},
        distributions=_distributions(module, space),
        system_attrs={f"{_RUNGS}{rung}": value for rung, value in rungs.items()},
        # Use samples, not steps: trials may differ in their batch, and a rung is the same amount of data for all.
        intermediate_values={look.samples: look.ne for look in trial.looks},
    )
    return frozen


def _distributions(module: ModuleType, space: Mapping[str, Dimension]) -> dict[str, BaseDistribution]:
    kinds: Any = module.distributions
    made: dict[str, BaseDistribution] = {}
    for key, dimension in space.items():
        # Optuna has no steps on a logarithmic range.
        step = None if dimension.log else dimension.step
        if dimension.kind == "choice":
            made[key] = kinds.CategoricalDistribution(dimension.choices)
        elif dimension.kind == "int":
            low, high = int(dimension.low or 0), int(dimension.high or 0)
            made[key] = kinds.IntDistribution(low, high, log=dimension.log, step=int(step or 1))
        else:
            made[key] = kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=step)
    return made
