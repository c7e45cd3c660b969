"""Runs a study for ``nightjar tune`` and ``nightjar run -m hydra/sweeper=nightjar``."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.commands.command import complain, progress, show, tell
from pipeline.errors import exit_code_of


def run_study(overrides: Sequence[str], config_dir: str | None, *, as_json: bool = False) -> int:
    """Run the study that ``overrides`` describe to its end and print it; the exit code."""
    from pipeline.launch.signals import Interrupted
    from pipeline.records.study import study_directory
    from pipeline.report.study import study_text
    from pipeline.tuning.study import BEST, PAGE, tune

    try:
        store, shown = tune(overrides, config_dir, progress(as_json, "tuning"))
    except Interrupted as stop:
        return complain(str(stop), exit_code_of(stop))
    tell(as_json, shown, study_text)
    if not as_json:
        folder = store.url_of(study_directory(shown.study.study))
        show(f"\nlook at {folder}/{PAGE}; {folder}/{BEST} is the best trial as an experiment")
    return 0
