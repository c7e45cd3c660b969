"""``nightjar judge``: a verdict on the scores of any framework, by the checks of the gate."""

from __future__ import annotations

import argparse
import re

from pipeline.cli.commands.command import Command, add_config_dir, amount, progress, show, tell, write_page
from pipeline.core.errors import ConfigError, GateHeldError

EPILOG = """\
A file is Parquet, CSV or Arrow, by its name, on any fsspec URL, with a row for each prediction. Two files hold the same
rows in the same order, unless --key names them. Overrides are those of group gate, and seed; docs/judge.md says more.

  nightjar judge candidate.parquet incumbent.parquet --label clicked --score p
  nightjar judge candidate.parquet incumbent.csv --key user --key item gate.max_ne_increase=0.001
  nightjar judge scores.parquet --score new --incumbent-score old --slice country --user user_id
  nightjar judge candidate.parquet incumbent.parquet gate.budget=1 --ledger s3://models/ledger.json
  nightjar judge candidate.parquet --page verdict.html     a first model: limits alone

exit code 0: PASS; 6: HOLD; 2: a wrong option, column or setting; 3: no such file, or rows that do not match or allow
no figures; 7: a ledger that cannot be read; 8: a ledger that others write all the time, or a store that does not answer
"""
# The path of a file may contain =, as in date=2026-01-31/scores.parquet.
_OVERRIDE = re.compile(r"[+~]*(gate=|seed=|[a-z_]+\.[\w.]+=)")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "nightjar judge FILE [FILE] [gate.<setting>=value ..] [options]"
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="scores of the candidate, then of the incumbent")
    add("--label", metavar="COLUMN", default="label", help="0 or 1, in the candidate's file (default: label)")
    add("--score", metavar="COLUMN", help="the scores (default: score, else probability)")
    add("--incumbent-score", metavar="COLUMN", help="those of the incumbent, in its file or beside the candidate's")
    add("--logits", action="store_true", help="scores are logits, not probabilities")
    key = "names a row, to match two files by; once for each column of the key"
    add("--key", metavar="COLUMN", action="append", default=[], help=key)
    slices = "judge the rows of each of its values, too; may be given again"
    add("--slice", metavar="COLUMN", action="append", default=[], dest="slices", help=slices)
    add("--weight", metavar="COLUMN", help="how many rows a row counts as")
    add("--time", metavar="COLUMN", help="sort the rows by it (default: they are in the order of time)")
    add("--user", metavar="COLUMN", help="measure GAUC, the AUC within each user")
    drop = "largest drop of GAUC (default: gate.max_gauc_drop, 0.002)"
    add("--max-gauc-drop", metavar="DROP", type=amount, help=drop)
    ledger = "looks at candidates of this model, which spend gate.budget; created if it is missing"
    add("--ledger", metavar="FILE", help=ledger)
    add("--day", metavar="YYYY-MM-DD", help="of the rows, for the ledger (default: today in UTC)")
    add("--json", action="store_true", help="print gate.json")
    add("--page", metavar="FILE", help="write the verdict as an HTML page")
    add("--markdown", metavar="FILE", help="write it as Markdown, for a ticket or a chat")
    add_config_dir(parser)
    parser.set_defaults(function=_judge)


def _judge(options: argparse.Namespace) -> int:
    from pipeline.evaluation.judge_scores import gate_settings_of, judge_scores
    from pipeline.evaluation.score_files import Columns
    from pipeline.records.gate import HOLD
    from pipeline.report.gate import gate_markdown, gate_page, gate_text

    # Options may stand between two files, and argparse then takes the second file for an override.
    words = [*options.files, *options.overrides]
    files, overrides = [], []
    for word in words:
        if _OVERRIDE.match(word):
            overrides.append(word)
        else:
            files.append(word)
    if len(files) not in (1, 2):
        raise ConfigError(
            f"got {len(files)} files ({', '.join(files) or 'none'}), expected the candidate's, "
            "and optionally the incumbent's",
            hint="nightjar judge candidate.parquet incumbent.parquet; overrides begin with gate. or seed=",
        )
    settings, seed = gate_settings_of(overrides, options.config_dir)
    columns = Columns(
        label=options.label,
        score=options.score,
        incumbent_score=options.incumbent_score,
        weight=options.weight,
        key=options.key,
        slices=options.slices,
        time=options.time,
        user=options.user,
        logits=options.logits,
    )
    incumbent = files[1] if len(files) == 2 else None
    record = judge_scores(
        files[0],
        incumbent,
        columns,
        settings,
        seed=seed,
        max_gauc_drop=options.max_gauc_drop,
        ledger=options.ledger,
        day=options.day,
        progress=progress(options.json, "judging"),
    )
    # Print the verdict first: a page that cannot be written must not lose the result that was computed for it.
    tell(options.json, record, gate_text)
    if options.page is not None:
        write_page(options.page, "--page", gate_page(record, files=""))
    if options.markdown is not None:
        write_page(options.markdown, "--markdown", gate_markdown(record))
    if options.page and not options.json:
        show(f"\nlook at {options.page}")
    return GateHeldError.exit_code if record.verdict == HOLD else 0


COMMANDS = (
    Command("judge", "judge the scores of any framework as the gate judges", _add_arguments, EPILOG, composes=True),
)
