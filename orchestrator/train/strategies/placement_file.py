"""The file of ``--placement PATH``: which host holds which expert, as a user wrote it. Read without torch, so that a wrong one is
refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experts.placement import check_placement, read_placement
from orchestrator.config.parallel import PLACEMENTS
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts


def placement_file(config: Config, facts: ModelFacts, hosts: int) -> list[tuple[int, ...]] | None:
    """What ``--placement PATH`` says; None where it names no file."""
    text = _file_text(config)
    if text is None:
        return None
    with _told_as_ours(config):
        return read_placement(
            text, len(facts.expert_weights), [len(weights) for weights in facts.expert_weights], hosts
        )


def check_placement_file(config: Config) -> None:
    """Refuse a file of ``--placement PATH`` that can be right for no model, before anything is started for it."""
    text, workers = _file_text(config), config.parallel.workers
    if text is not None:
        with _told_as_ours(config):
            check_placement(text, workers if isinstance(workers, int) else None)


def _file_text(config: Config) -> str | None:
    asked = config.parallel.placement
    if asked in PLACEMENTS:
        return None
    try:
        return Path(asked).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--placement {asked} cannot be read ({error}); give auto, round_robin or a JSON file"
        ) from None


@contextmanager
def _told_as_ours(config: Config) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"--placement {config.parallel.placement}: {error}") from None
