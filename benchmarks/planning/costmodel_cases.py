"""The configurations that predictions are compared with: on CPUs, on CPUs but kept back at first,
and on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.config.settings import Config


@dataclass(frozen=True)
class Case:
    """A configuration to predict and to measure."""

    settings: dict[str, Any]
    batch: int
    workers: int = 1
    strategy: str = "single"
    counts: bool = True
    """Whether its error counts for the limits: not where workers outnumber the cores."""

    @property
    def name(self) -> str:
        shown = {name: value for name, value in self.settings.items() if name not in ("task", "samples")}
        words = " ".join(f"{name.replace('_', '-')} {value}" for name, value in shown.items())
        return f"{self.settings['task']} {words}, batch {self.batch}".replace(" ,", ",")

    @property
    def where(self) -> str:
        names = {
            "single": "1 process",
            "data_parallel": f"{self.workers} workers",
            "expert_parallel": f"{self.workers} hosts",
        }
        return names[self.strategy]

    def config(self, on_gpu: bool) -> Config:
        more: dict[str, Any] = {"gpu_mode": "single_gpu" if on_gpu else "cpu", "batch_size": self.batch}
        if self.workers > 1:
            more |= {"parallel_strategy": self.strategy, "workers": self.workers}
        return Config.of(**self.settings, **more)


def text(**settings: Any) -> dict[str, Any]:
    return {"task": "text", **settings}


def digits(**settings: Any) -> dict[str, Any]:
    return {"task": "digits", **settings}


def vectors(**settings: Any) -> dict[str, Any]:
    return {"task": "synthetic", "sequence_length": 0, "samples": 4096, **settings}


def tokens(**settings: Any) -> dict[str, Any]:
    return {"task": "synthetic", "samples": 512, **settings}


ON_CPU = (
    Case(digits(), 64),
    Case(digits(experts=0, width=256, layers=4), 128),
    Case(digits(experts=16, width=128, expert_hidden_size=256), 256),
    Case(text(experts=0), 8),
    Case(text(), 8),
    Case(text(width=256, layers=4, expert_hidden_size=256), 4),
    Case(text(experts=0, width=384, layers=3, sequence_length=256), 2),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024),
    Case(tokens(experts=0, width=192, sequence_length=64, vocabulary=8192), 16),
    Case(digits(width=128, expert_hidden_size=256), 256, 2, "expert_parallel"),
    Case(text(), 8, 2, "expert_parallel"),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024, 2, "expert_parallel"),
    Case(digits(), 64, 2, "data_parallel"),
    Case(text(experts=0), 8, 2, "data_parallel"),
    Case(text(width=192), 4, 2, "data_parallel"),
    Case(text(), 8, 3, "expert_parallel", counts=False),
)


FRESH = (
    Case(digits(experts=4, width=96, layers=3, expert_hidden_size=192, top_k=1), 192),
    Case(text(experts=0, width=160, layers=4, sequence_length=96), 6),
    Case(text(experts=6, width=96, layers=3, expert_hidden_size=320, sequence_length=192), 5),
    Case(vectors(width=320, experts=12, expert_hidden_size=160, layers=3), 400),
    Case(tokens(experts=0, width=320, layers=2, sequence_length=48, vocabulary=1000), 40),
    Case(text(experts=6, width=96, expert_hidden_size=320), 12, 2, "expert_parallel"),
    Case(digits(experts=12, width=192, expert_hidden_size=192), 128, 2, "expert_parallel"),
    Case(tokens(experts=0, width=320, layers=2, sequence_length=48, vocabulary=1000), 20, 2, "data_parallel"),
)
"""First measured when the model was finished; the others were looked at while it was made."""


def _gpt(**settings: Any) -> dict[str, Any]:
    return tokens(width=768, layers=12, sequence_length=1024, vocabulary=50257, experts=0, **settings)


def _moe(
    width: int, layers: int, sequence_length: int, experts: int, expert_hidden_size: int
) -> dict[str, Any]:
    return tokens(
        width=width,
        layers=layers,
        sequence_length=sequence_length,
        vocabulary=8192,
        experts=experts,
        expert_hidden_size=expert_hidden_size,
        precision="bf16",
    )


ON_GPU = (
    Case(_gpt(precision="bf16"), 16),
    Case(_gpt(precision="bf16"), 3),
    Case(_gpt(precision="fp32"), 8),
    Case(tokens(width=1024, layers=6, sequence_length=512, vocabulary=8192, experts=0, precision="bf16"), 32),
    Case(_moe(1024, 4, 512, 16, 1024), 32),
    Case(_moe(512, 8, 256, 32, 512), 64),
    Case(vectors(width=1024, layers=2, experts=8, expert_hidden_size=4096, precision="bf16"), 4096),
    Case(vectors(width=2048, layers=4, experts=0, precision="fp32"), 4096),
    Case(text(precision="bf16"), 64),
)
