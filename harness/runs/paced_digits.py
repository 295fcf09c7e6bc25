"""The digits, with steps that take some time."""

from __future__ import annotations

from time import sleep
from typing import Any

from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss

_STEP_SECONDS = 0.25


class PacedDigits(Digits):
    """Each worker sleeps in every step, as if a GPU worked for it: a disturbance hits a run that goes on."""

    def loss(self, model: Any, batch: Any) -> Loss:
        if model.training:
            sleep(_STEP_SECONDS)
        return super().loss(model, batch)
