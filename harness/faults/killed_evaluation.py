"""The digits, with an evaluation whose worker is killed if a file asks for it.

It is named on the command line as ``harness.faults.killed_evaluation:KilledDigits``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss


class KilledDigits(Digits):
    """``--data-dir`` is the folder with the files ``once`` and ``always``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.but(data_dir=None))
        self.folder = Path(str(config.data.data_dir))

    def loss(self, model: Any, batch: Any) -> Loss:
        if not model.training:
            with suppress(FileNotFoundError):  # nothing asks for it, or another worker was faster
                (self.folder / "once").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if (self.folder / "always").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
