"""What a stage made: lines of the table at the end of a run, and details of the report."""

from __future__ import annotations

from collections import Counter

from pipeline.core import units
from pipeline.records.result import (
    CheckpointPart,
    Evaluation,
    GatePart,
    IngestPart,
    LinkShare,
    PlanPart,
    TowersPart,
    TrainPart,
)
from pipeline.report.run_tables import phase_lines
from pipeline.report.summary import doubts, reachable_gain, short_path

MAX_WARNINGS = 5  # warnings of the ingest stage in the table at the end of a run
TIERS = ("hbm", "ddr", "ssd")


def ingest_lines(part: IngestPart) -> list[str]:
    """Describe the rows, the rate, and what is worth a warning."""
    lines = [
        f"{units.count(part.rows)} rows, {units.count(part.rows_quarantined)} of them in quarantine",
        f"{units.size(part.bytes_in)} read, {units.count(part.rows_per_s)} rows/s",
    ]
    if part.snapshot:
        lines.append(f"of {part.snapshot}")
    if part.split_time is not None:
        until, since = part.split_time["train_until"], part.split_time["test_from"]
        line = f"tested on rows from {since} UTC on"
        if until != since:
            line += f", trained on rows before {until} UTC ({units.count(part.rows_gap)} rows in between)"
        lines.append(line)
    if part.reasons:
        reasons = []
        for kind, count in part.reasons.items():
            reasons.append(f"{kind} ({units.count(count)})")
        # The record has only the most frequent reasons.
        others = (part.rows_quarantined or 0) - sum(part.reasons.values())
        if others > 0:
            reasons.append(f"others ({units.count(others)})")
        lines.append(f"quarantined: {', '.join(reasons)}")
    if part.rows_left_out:
        lines.append(f"{units.count(part.rows_left_out)} rows without a click left out of training")
    if part.rows_repeated:
        lines.append(f"{units.count(part.rows_repeated)} repeated rows dropped")
    for name, profile in (part.sequences or {}).items():
        lengths = f"mean {profile.mean:.1f}, 99th percentile {profile.p99}, longest {profile.longest}"
        line = f"events of {name}: {lengths}; {profile.empty_share:.1%} of the train rows have none"
        if profile.left_out:
            line += f", {units.count(profile.left_out)} left out that are not before their row"
        lines.append(line)
    days = {**(part.rows_relabelled or {}), **(part.rows_corrected or {})}
    if days:
        corrected = ", ".join(f"{units.count(count)} of {day}" for day, count in days.items())
        lines.append(f"labels corrected by later clicks: {corrected}")
    if part.labels_young:
        lines.append(f"labels are final with the clicks of {part.labels_final}")
    if part.replaces:
        lines.append(f"replaces {short_path(part.replaces, 16)}")
    warnings = part.warnings or ()
    for warning in warnings[:MAX_WARNINGS]:
        lines.append(f"warning: {warning}")
    if len(warnings) > MAX_WARNINGS:
        lines.append(f"and {len(warnings) - MAX_WARNINGS} more warnings")
    return lines


def plan_lines(part: PlanPart) -> list[str]:
    """Describe how many tables lie where, and what they take."""
    tables, tiers = part.tables or {}, part.tiers or {}
    kinds = Counter(f"{table.sharding} in {table.tier}" for table in tables.values())
    count = "no tables"
    if kinds:
        # Show the most frequent kind first, and equally frequent ones in the order of the plan.
        shares = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        count = f"{units.plural(len(tables), 'table')}: {shares}"
    sizes = []
    for tier in TIERS:
        if tiers.get(f"{tier}_bytes"):
            sizes.append(f"{tier.upper()} {units.size(tiers[f'{tier}_bytes'])}")
    return [
        count,
        f"{', '.join(sizes) or 'no memory'}; step {units.decimal(part.predicted_step_ms, 3)} ms (predicted)",
    ]


def towers_lines(part: TowersPart) -> list[str]:
    """Describe how many towers there are, where, and of how many features."""
    smallest, largest = min(part.features, default=0), max(part.features, default=0)
    sizes = f"{largest}" if smallest == largest else f"{smallest} to {largest}"
    where = f"{units.plural(part.towers, 'tower')} on {units.plural(part.hosts, 'host')}"
    return [f"{where}, {sizes} features each; {part.strategy}, module {part.module}"]


def train_lines(part: TrainPart) -> list[str]:
    """Describe the samples, the speed, memory, validation and phases of a training."""
    lines = _samples_lines(part)
    wait = f"{units.percent(part.data_wait_share)} of the time waiting for data"
    lines.append(f"{units.count(part.samples_per_s)} samples/s, {wait}")
    lines.append(f"peak memory {units.size(part.peak_rss_bytes)}")
    if part.teacher is not None:
        lines.append(f"learnt from labels and from version {part.teacher}")
    ensemble = part.ensemble
    if ensemble is None:
        lines += _validation_lines(part)
    else:
        steps = ", ".join(member.checkpoint.rpartition("-")[2].lstrip("0") for member in ensemble.members)
        lines.append(
            f"ensemble of {units.count(len(ensemble.members))} of {units.count(ensemble.made)} snapshots, after steps "
            f"{steps}: validation NE {units.decimal(ensemble.ne, 5)}, {units.decimal(ensemble.best_ne, 5)} the best "
            "one alone"
        )
    sent = part.bytes_per_sample or LinkShare()
    within, between = sent.intra_host, sent.inter_host
    if units.known(within) and units.known(between) and within + between:
        lines.append(f"embeddings sent per sample: {units.size(between)} between hosts, {units.size(within)} within")
    return [*lines, *phase_lines(part)]


def _samples_lines(part: TrainPart) -> list[str]:
    samples, steps, resumed = part.samples, part.steps, part.resumed
    time = f"{units.duration(part.seconds)} on {units.plural(part.world_size, 'rank')}"
    whole = f"{units.count(samples)} samples in {units.plural(steps, 'step')}"
    if not resumed or not units.known(samples) or not units.known(steps):
        return [f"{whole}, {time}"]
    # Seconds and rates of a resumed training cover only the steps since it last resumed.
    whole += f" in all, resumed after step {units.count(resumed.step)}"
    if resumed.planned:
        whole += f", with the rates of {units.count(resumed.planned)} planned steps until then"
    session = units.plural(steps - resumed.step, "step")
    return [whole, f"this session: {units.count(samples - resumed.samples)} samples in {session}, {time}"]


def _validation_lines(part: TrainPart) -> list[str]:
    best = part.validation
    if best is None:
        return []
    figures = f"validation NE {units.decimal(best.ne, 5)}   AUC {units.decimal(best.auc, 5)}"
    step = f"after step {units.count(best.best_step)}, epoch {units.decimal(best.best_epoch, 2)}"
    lines = [
        f"{figures} on {units.count(best.rows)} rows",
        f"the best of {units.plural(best.looks, 'look')}: {step}",
    ]
    if best.start_ne is not None:
        lines.append(f"validation NE before training {units.decimal(best.start_ne, 5)}")
    if best.stopped:
        lines.append(f"training stopped by itself after step {units.count(part.steps)}: no later look was better")
    return lines


def checkpoint_lines(part: CheckpointPart) -> list[str]:
    """Describe count, bytes and stalls of a training's checkpoints."""
    written, full = part.bytes_written, part.bytes_full_equivalent
    line = f"{units.count(part.count)} written, {units.size(written)}"
    if units.known(full) and full != written:
        line += f" of {units.size(full)} for full ones"
    lines = [f"{line}, training stalled {units.percent(part.stall_share)}"]
    if part.skipped:
        lines.append(f"{units.count(part.skipped)} skipped, for the one before was still being written")
    if part.failed:
        lines.append(f"{units.count(part.failed)} failed, their rows went into the next")
    return lines


def train_facts(part: TrainPart, saved: CheckpointPart) -> list[tuple[str, str]]:
    """List steps, time, memory and traffic of a training; bytes and stalls of its checkpoints."""
    sent, before = part.bytes_per_sample or LinkShare(), None
    if part.resumed is not None:
        before = part.resumed.step
    facts = [
        ("Training steps", units.count(part.steps)),
        ("Training samples", units.count(part.samples)),
        ("Steps before this session", units.count(before)),
        ("Training time", units.duration(part.seconds)),
        ("Ranks", units.count(part.world_size)),
    ]
    if part.teacher is not None:
        facts.append(("Teacher", part.teacher))
    if (best := part.validation) is not None:
        facts += [
            ("Validation rows", units.count(best.rows)),
            ("Validations", units.count(best.looks)),
            ("Best after step", units.count(best.best_step)),
            ("Best validation NE", units.decimal(best.ne, 5)),
            ("Learning rates lowered", units.count(best.lr_drops)),
            ("Time for validation", units.duration(best.seconds)),
        ]
    if (ensemble := part.ensemble) is not None:
        members = f"{units.count(len(ensemble.members))} of {units.count(ensemble.made)} snapshots"
        facts += [
            ("Members of the ensemble", members),
            ("Their validation NE together", units.decimal(ensemble.ne, 5)),
            ("That of the best one alone", units.decimal(ensemble.best_ne, 5)),
            ("That of as many newest ones", units.decimal(ensemble.last_ne, 5)),
            ("Time for choosing them", units.duration(ensemble.seconds)),
        ]
    facts.append(("Peak memory", units.size(part.peak_rss_bytes)))
    if (ssd := part.ssd) is not None:
        facts += [
            ("Lookups of tables on SSD that did not wait", units.percent(ssd.ssd_hit_rate)),
            ("Their rows in the device's memory", units.percent(ssd.ssd_device_share)),
            ("Their rows in host memory behind it", units.percent(ssd.ssd_host_share or None)),
            ("Read from SSD, bytes per step", units.size(ssd.ssd_read_bytes)),
            ("Written to SSD, bytes per step", units.size(ssd.ssd_written_bytes)),
        ]
    return [
        *facts,
        ("Embeddings between hosts, bytes per sample", units.count(sent.inter_host)),
        ("Embeddings within hosts, bytes per sample", units.count(sent.intra_host)),
        ("Dense gradients between hosts, bytes per sample", units.count(sent.dense_inter_host)),
        ("Checkpoints written", units.count(saved.count)),
        ("Checkpoint bytes", units.size(saved.bytes_written)),
        ("Bytes of as many full ones", units.size(saved.bytes_full_equivalent)),
        ("Stalled by checkpoints", units.percent(saved.stall_share)),
        ("Checkpoints skipped", units.count(saved.skipped or None)),
        ("Checkpoints failed", units.count(saved.failed or None)),
    ]


def evaluation_lines(part: Evaluation) -> list[str]:
    """Describe the metrics, and how near they are to the best possible ones."""
    lines = [
        f"NE {units.decimal(part.ne, 5)}   AUC {units.decimal(part.auc, 5)}   "
        f"log loss {units.decimal(part.logloss, 5)}   calibration {units.decimal(part.calibration)}"
    ]
    if part.ne_interval is not None and part.auc_interval is not None:
        lines.append(f"95% intervals: NE {_ends(part.ne_interval)}, AUC {_ends(part.auc_interval)}")
    if part.group_by is not None and part.gauc is None:
        lines.append(f"GAUC is not defined: no group by {part.group_by} has test rows of both classes")
    elif part.group_by is not None:
        interval = ""
        if part.gauc_interval is not None:
            interval = f" (95% interval {_ends(part.gauc_interval)})"
        groups = units.plural(part.gauc_groups, "group")
        lines.append(f"GAUC {units.decimal(part.gauc, 5)}{interval} within {groups} by {part.group_by}")
    lines.append(f"on {units.plural(part.samples, 'test row')}")
    for doubt in doubts(part):
        lines.append(f"warning: {doubt}")
    for name, task in (part.tasks or {}).items():
        # A task's kind decides which of these figures it has.
        named = {"NE": task.ne, "AUC": task.auc, "RMSE": task.rmse, "unexplained": task.unexplained}
        figures = [f"{title} {units.decimal(value, 5)}" for title, value in named.items() if units.known(value)]
        if units.known(task.calibration):
            figures.append(f"calibration {units.decimal(task.calibration)}")
        rows = f"{units.count(task.samples)} rows with a label"
        lines.append(f"{name}: {'   '.join(figures) or 'no figures'} on {rows}")
    if units.known(part.ne) and part.ne > 1:
        lines.append("NE above 1 is worse than predicting the click rate for every row: the model learned nothing")
        lines.append("that holds, or overfits. Try data.split.validation_share=0.1, fewer train.epochs, or")
        lines.append("model.dropout.")
    if units.known(part.bayes_ne):
        line = f"best reachable NE {units.decimal(part.bayes_ne, 5)}"
        gain = reachable_gain(part)
        if gain is not None:
            line += f": {units.percent(gain)} of the reachable gain"
        lines.append(line)
    return lines


def _ends(interval: tuple[float, float]) -> str:
    return f"{units.decimal(interval[0], 5)} to {units.decimal(interval[1], 5)}"


def gate_lines(part: GatePart) -> list[str]:
    """Describe the verdict with its reasons."""
    return [part.verdict, *part.reasons, *(f"warning: {text}" for text in part.warnings or ())]
