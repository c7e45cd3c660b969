"""Tab completion for bash: ``eval "$(nightjar run -sc install=bash)"``.

Hydra's own script completes only a program's first word. This one knows the commands, and asks Hydra for the groups,
options and keys after ``nightjar run`` and the other commands that take overrides.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence

from pipeline.core.errors import ConfigError

SCRIPT = """\
_nightjar_complete() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" line="${{COMP_LINE:0:COMP_POINT}}" command="${{COMP_WORDS[1]}}" choices
  # COMP_WORDS may be split at '='; the word to complete is what follows the last blank.
  word="${{line##* }}"
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    COMPREPLY=("${{COMPREPLY[@]/%/ }}")
    return
  fi
  case " {composing} " in *" $command "*) ;; *) return ;; esac
  choices="$(COMP_LINE="$line" "$1" run -sc query=bash 2>/dev/null)"
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
  # bash replaces only what follows its last word break: hand back the rest of the word alone.
  local breaks="${{COMP_WORDBREAKS//[^=:]/}}" head="" i
  if [[ -n "$breaks" && "$word" == *["$breaks"]* ]]; then
    head="${{word%"${{word##*["$breaks"]}}"}}"
    for i in "${{!COMPREPLY[@]}}"; do COMPREPLY[i]="${{COMPREPLY[i]#"$head"}}"; done
  fi
}}
complete -o nospace -o default -F _nightjar_complete nightjar
"""


def script(commands: Sequence[str], composing: Sequence[str]) -> str:
    """Return the bash script to ``eval``; ``composing``: the commands that take overrides."""
    return SCRIPT.format(commands=" ".join(commands), composing=" ".join(composing))


def uninstall() -> str:
    """Return the bash commands that undo ``script``."""
    return "complete -r nightjar\nunset -f _nightjar_complete\n"


def query(line: str) -> list[str]:
    """Return the completions of the command line ``line`` (``nightjar run mod``)."""
    from hydra._internal.core_plugins.bash_completion import BashCompletion

    from pipeline.config.compose import ROOT, hydra_session
    from pipeline.config.paths import field_type

    # Drop the program and its command, which Hydra does not know.
    words = line.split(None, 2)
    rest = words[2] if len(words) > 2 else ""
    with hydra_session() as (hydra, _):
        choices = BashCompletion(hydra.config_loader)._query(config_name=ROOT, line=rest)
    completions = set()
    for choice in choices:
        if choice.startswith("hydra"):
            continue
        # Hydra puts a dot after a list, although a list is set as a whole.
        if choice.endswith(".") and typing.get_origin(field_type(choice[:-1])) is list:
            choice = f"{choice[:-1]}="
        completions.add(choice)
    return sorted(completions)


def answer(arguments: Sequence[str], commands: Sequence[str], composing: Sequence[str]) -> str:
    """Return what ``-sc install=bash``, ``uninstall=bash`` and ``query=bash`` print; ConfigError for anything else."""
    if list(arguments) == ["install=bash"]:
        return script(commands, composing)
    if list(arguments) == ["uninstall=bash"]:
        return uninstall()
    if list(arguments) == ["query=bash"]:
        # bash puts the line to complete into this variable.
        return " ".join(query(os.environ.get("COMP_LINE", ""))) + "\n"
    raise ConfigError(
        f"-sc got {' '.join(arguments) or 'nothing'}, expected install=bash or uninstall=bash",
        hint='eval "$(nightjar run -sc install=bash)"',
    )
