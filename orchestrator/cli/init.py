"""``orchestrator init``: write a commented config for this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.reading.flags import read_options
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.writer import dump, setting_texts
from orchestrator.errors import UserError
from orchestrator.types import Choice, value_text


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config for this machine."""

    path: Path = Path("orchestrator.yaml")
    """Where to write it."""
    force: bool = False
    """Overwrite an existing file."""


def run(argv: Sequence[str]) -> int:
    options = read_options(InitOptions, argv, "orchestrator init", positional="path")
    path = options.path
    if path.exists() and not options.force:
        raise UserError(f"{path} exists already; choose another name, or overwrite it with --force")
    text = _commented_config()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    from orchestrator.cli.tables import print_line

    print_line(f"wrote {path}; start with: orchestrator train --config {path}")
    return 0


def _commented_config() -> str:
    """Return every setting with its default, its meaning, and the plan's choice on this machine."""
    from orchestrator.trainer import Trainer

    prepared = Trainer(config=Config()).prepare()
    choices = prepared.plan.choices()
    comments = {name: _comment(name, text, choices) for name, text in setting_texts().items()}
    machine = f"{prepared.plan.device.value}, {prepared.inventory.cores} cores"
    head = (
        f"# expert-orchestrator settings, written for this machine ({machine}).\n"
        "# The plan decides settings of null and auto; 'here' says what it would choose now. "
        "Use: orchestrator train --config FILE\n"
    )
    return head + dump(Resolved(Config(), {}), comments)


def _comment(name: str, text: str, choices: Mapping[str, Choice[Any]]) -> str:
    choice = f" (here: {value_text(choices[name].value)})" if name in choices else ""
    return text + choice
