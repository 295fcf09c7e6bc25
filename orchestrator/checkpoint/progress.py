"""How far a run has come, and the check of a progress section that was read from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from orchestrator.data.source import SavedPlace
from orchestrator.errors import UserError

_MAX_COUNT = 2**62  # a larger count in a checkpoint was not written by a run
OTHER_CHECKPOINT = "resume from another one, or give it to --init-from for its weights alone"


@dataclass
class Progress:
    """How far a run has come.

    ``step`` counts finished optimizer steps. The next one begins at sample ``position`` of
    ``epoch``'s order: a run with another batch size can resume here and still see each sample
    once."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0
    place: SavedPlace | None = None
    """A place of the data at or before ``position``, if the data is read in order."""
    best_step: int | None = None
    best_value: float | None = None
    best_loss: float | None = None
    """The validation loss of the best step; it decides between equal values."""
    bad_evaluations: int = 0
    # Sums since the epoch began, for its means.
    epoch_loss: float = 0.0
    epoch_count: float = 0.0
    epoch_seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    grid_exponent: int | None = None
    """Exponent of the grid of exact sums in the next step; None in a run without such sums."""

    def start_next_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self.place = None
        self.epoch_loss = 0.0
        self.epoch_count = 0.0
        self.epoch_seconds = 0.0


def read_progress(state: Mapping[str, Any]) -> Progress:
    """Return the progress in a checkpoint's state.

    Raise ``UserError`` if no run can have written it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        # Through JSON: strict validation then accepts what JSON can hold, and nothing else.
        text = json.dumps(state.get("progress"))
        progress = TypeAdapter(Progress).validate_json(text, strict=True)
        has_unknown_fields = not set(state["progress"]) <= {f.name for f in fields(Progress)}
    except (ValidationError, TypeError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(str(part) for part in first["loc"]) if first else ""
        raise _invalid(where or "it is missing") from None
    counts = (
        progress.step,
        progress.epoch,
        progress.position,
        progress.samples,
        progress.best_step or 0,
        progress.place.position if progress.place else 0,
        progress.bad_evaluations,
    )
    is_valid = all(0 <= count < _MAX_COUNT for count in counts) and abs(progress.grid_exponent or 0) < 2**11
    if has_unknown_fields or not is_valid:
        raise _invalid(f"step {progress.step}, epoch {progress.epoch}")
    return progress


def _invalid(detail: str) -> UserError:
    return UserError(f"the checkpoint's progress section is invalid ({detail}); {OTHER_CHECKPOINT}")
