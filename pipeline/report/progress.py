"""The progress of a run: a live line on a terminal, plain lines elsewhere, and the same records as JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.core import units
from pipeline.core.logs import TERMINAL, Terminal, show
from pipeline.records.result import Result
from pipeline.report.records import NORMS, MetricsLog
from pipeline.report.summary import summary
from pipeline.store.artifacts import Store

log = logging.getLogger(__name__)
CLEAR_TO_END = "\x1b[K"
SHOWN_FILES = ("report.html", "result.json", "metrics.jsonl", "config.yaml")
SMALLEST_BAR, LARGEST_BAR = 6, 28


class Reporter:
    """Shows the progress of a run and records it in ``metrics.jsonl``. Use one per run, on rank 0.

    ``columns``: width of ``terminal``; 0 for a file, a pipe or a pod's log, where each record is a log line.
    """

    def __init__(self, store: Store, run: str, *, columns: int = 0, terminal: Terminal = TERMINAL) -> None:
        self.store, self.run, self.columns, self.terminal = store, run, columns, terminal
        self._metrics, self._norms = MetricsLog(store, run), MetricsLog(store, run, NORMS)

    def interval(self, record: Mapping[str, Any]) -> None:
        """Show and store a ``record`` of the training loop (``records.KEYS``). ArtifactError if the disk is full."""
        if self.columns:
            self.terminal.write(f"\r{live_line(record, self.columns - 1)}{CLEAR_TO_END}")
        else:
            log.info("%s", plain_line(record))
        # Histograms of norms are for trackers and much longer than the figures, so they have their own file.
        metrics = dict(record)
        metrics.pop("norms", None)
        self._metrics.append(metrics)
        if "norms" in record:
            self._norms.append({name: record[name] for name in ("step", "steps_total", "resumed_step", "norms")})
        if record["step"] == record["steps_total"]:
            self.close()

    def close(self) -> None:
        """End the live line and store pending records. The last step calls it."""
        self.terminal.end_line()
        self._metrics.flush()
        self._norms.flush()

    def summary(self, result: Result) -> str:
        """Print the table at the end of a run (at most 80 columns), and return it."""
        self.close()
        directory = f"runs/{self.run}"
        present = self.store.names(directory)
        text = summary(result, self.store.url_of(directory), [name for name in SHOWN_FILES if name in present])
        show(f"\n{text}")
        return text


def plain_line(record: Mapping[str, Any]) -> str:
    """Format as ``step 200/1171  17%  samples/s 81,234  wait 0.4%  loss 0.4712  NE 0.8321  ETA 00:01:12``."""
    total = str(record["steps_total"])
    parts = [
        f"step {record['step']:>{len(total)}}/{total}",
        f"{_done(record):4.0%}",
        f"samples/s {units.count(record.get('samples_per_s'))}",
        f"wait {units.percent(record.get('data_wait_share'))}",
        f"loss {units.decimal(record.get('loss'))}",
        f"NE {units.decimal(record.get('ne_window'))}",
        f"ETA {units.clock(record.get('eta_seconds'))}",
    ]
    # Insert further figures before the remaining time, which stays at the end of each line.
    for name, figures in (record.get("tasks") or {}).items():
        title, value = next(iter(figures.items()))
        parts.insert(-1, f"{name} {title.upper()} {units.decimal(value)}")
    if "validation_ne" in record:
        best = f"best {units.decimal(record.get('best_ne'))} after step {units.count(record.get('best_step'))}"
        parts.insert(-1, f"validation NE {units.decimal(record['validation_ne'])}, {best}")
    if "gflop_per_s" in record:
        share = units.percent(record.get("ceiling_share"))
        parts.insert(-1, f"GFLOP/s {units.count(record['gflop_per_s'])}, {share} of the ceiling")
    if "ssd_hit_rate" in record:
        hit = units.percent(record.get("ssd_hit_rate"))
        if record.get("ssd_host_share"):
            device, host = units.percent(record.get("ssd_device_share")), units.percent(record["ssd_host_share"])
            hit += f" (device {device}, host {host})"
        covered, faults = units.percent(record.get("ssd_prefetch_coverage")), units.count(record.get("ssd_faults"))
        read, written = units.size(record.get("ssd_read_bytes")), units.size(record.get("ssd_written_bytes"))
        parts.insert(-1, f"ssd hit {hit} ahead {covered} faults {faults} read {read} written {written} a step")
    return "  ".join(parts)


def live_line(record: Mapping[str, Any], width: int) -> str:
    """Format the same with a bar, at most ``width`` long: it drops the bar first, then less important figures."""
    head = f"{record['step']}/{record['steps_total']} {_done(record):4.0%}"
    parts = [
        f"{units.count(record.get('samples_per_s'))}/s",
        f"wait {units.percent(record.get('data_wait_share'))}",
        f"loss {units.decimal(record.get('loss'))}",
        f"NE {units.decimal(record.get('ne_window'))}",
        f"ETA {units.clock(record.get('eta_seconds')).removeprefix('00:')}",
    ]
    text = "  ".join([head, *parts])
    # Drop the least important figures first: wait, loss, speed, NE, and last the remaining time.
    for dropped in (1, 2, 0, 3, 4):
        if len(text) <= width:
            break
        parts[dropped] = ""
        text = "  ".join(filter(None, [head, *parts]))
    room = min(width - len(text) - 3, LARGEST_BAR)
    if room < SMALLEST_BAR:
        return text[:width]
    full = int(_done(record) * room)
    head = ">" if full < room else ""
    return f"[{'=' * full}{head}{' ' * (room - full - len(head))}] {text}"


def _done(record: Mapping[str, Any]) -> float:
    return min(1.0, record["step"] / max(1, record["steps_total"]))
