"""``orchestrator --completion SHELL``: a script that completes verbs and flags in a shell."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.values import choices
from orchestrator.errors import UserError
from orchestrator.types import flag_of

_BASH = """# bash completion of orchestrator; put it to work with: source <(orchestrator --completion bash)
_orchestrator() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case $before in
{values}
  esac
  case $word in
    --*) case ${{COMP_WORDS[1]}} in
{flags}
    esac ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _orchestrator orchestrator
"""


def completion(shell: str, verbs: Mapping[str, str]) -> str:
    """Return the script of a shell; ``verbs`` are the verbs with their help."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        known = ", ".join(scripts)
        raise UserError(f"no completion for {shell!r}{did_you_mean(shell, scripts)}; shells are {known}")
    return scripts[shell](verbs)


def _bash(verbs: Mapping[str, str]) -> str:
    answers = [
        f'    --{name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")); return ;;'
        for name, words in _words_of_settings().items()
    ]
    flags = [
        f'      {verb}) COMPREPLY=($(compgen -W "{" ".join(_flags(verb))}" -- "$word")) ;;' for verb in verbs
    ]
    return _BASH.format(verbs=" ".join(verbs), values="\n".join(answers), flags="\n".join(flags))


def _zsh(verbs: Mapping[str, str]) -> str:
    # zsh runs bash's functions of completion.
    head = "# zsh completion of orchestrator; put it to work with: source <(orchestrator --completion zsh)\n"
    load = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n"
    return head + load + _bash(verbs).partition("\n")[2]


def _fish(verbs: Mapping[str, str]) -> str:
    lines = [
        "# fish completion of orchestrator; put it to work with: orchestrator --completion fish | source"
    ]
    for verb, text in verbs.items():
        lines.append(f"complete -c orchestrator -n __fish_use_subcommand -f -a {verb} -d '{text}'")
    words = _words_of_settings()
    for verb in verbs:
        for flag in _flags(verb):
            name = flag[2:]
            values = f" -x -a '{' '.join(words[name])}'" if name in words else ""
            condition = f"'__fish_seen_subcommand_from {verb}'"
            lines.append(f"complete -c orchestrator -n {condition} -l {name}{values}")
    return "\n".join(lines) + "\n"


def _flags(verb: str) -> list[str]:
    """Return the flags of a verb: its own options, and all settings where it takes them."""
    options = _options_of(verb)
    own = [field.name for field in fields(options) if field.name != "settings"]
    takes_settings = Config in get_type_hints(options).values()
    names = [*own, *(flat_names() if takes_settings else ()), "help"]
    return [flag_of(name) for name in dict.fromkeys(names)]


def _options_of(verb: str) -> Any:
    """Return the dataclass of a verb's options: the one that is named after it."""
    module = importlib.import_module(f"orchestrator.cli.{verb}")
    options = getattr(module, f"{verb.capitalize()}Options")
    assert is_dataclass(options)
    return options


def _words_of_settings() -> Mapping[str, Sequence[str]]:
    """Return the words that a setting may be, by its flag without dashes."""
    words = {name.replace("_", "-"): choices(hint) for name, hint in setting_types().items()}
    return {name: values for name, values in words.items() if values}
