"""The file of ``--placement PATH``, which assigns experts to hosts.

It is read without torch, so that an invalid one is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from experts.placement.placement import check_placement, read_placement
from orchestrator.config.sections.parallel import PLACEMENTS
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.storage.folder import RemoteError
from orchestrator.storage.local_copy import read_file


def placement_file(config: Config, facts: ModelFacts, num_hosts: int) -> list[tuple[int, ...]] | None:
    """Return the host of each expert, by layer, from the file of ``--placement``; None without a file."""
    text = _file_text(config)
    if text is None:
        return None
    num_experts = [len(weights) for weights in facts.expert_weights]
    with _as_user_error(config):
        return read_placement(text, len(num_experts), num_experts, num_hosts)


def check_placement_file(config: Config) -> None:
    """Refuse a file of ``--placement`` that is valid for no model, before the run starts anything."""
    text = _file_text(config)
    workers = config.parallel.workers
    if text is not None:
        with _as_user_error(config):
            check_placement(text, workers if isinstance(workers, int) else None)


def _file_text(config: Config) -> str | None:
    path = config.parallel.placement
    if path in PLACEMENTS:
        return None
    try:
        return read_file("--placement", path).decode("utf-8")
    except (OSError, UnicodeDecodeError, RemoteError) as error:
        raise UserError(
            f"--placement {path} cannot be read ({error}); give auto, round_robin or a JSON file"
        ) from None


@contextmanager
def _as_user_error(config: Config) -> Iterator[None]:
    """Raise a ``ValueError`` of the block as the user's error."""
    try:
        yield
    except ValueError as error:
        advice = "change the file, or give --placement auto"
        raise UserError(f"--placement {config.parallel.placement}: {error}; {advice}") from None
