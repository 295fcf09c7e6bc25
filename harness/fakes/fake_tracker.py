"""A tracker that records the calls it receives."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {"task": "digits", "run": {"epochs": 3, "name": None}, "optim": {"learning_rate": 0.003}}
Points = list[tuple[int, float]]
"""Step and value."""


class FakeTracker:
    """Records values by name, texts, and the threads that called it."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self.name = run_name
        self.config = config
        self.points: dict[str, Points] = {}
        self.texts: dict[str, str] = {}
        self.closed = 0
        self.threads = {threading.get_ident()}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.threads.add(threading.get_ident())
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))

    def text(self, name: str, content: str) -> None:
        self.texts[name] = content

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1
