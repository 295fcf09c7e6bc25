"""Settings of the optimizer, its schedule and the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.sections.checks import at_least, positive

Optimizer = Literal["adamw", "adamw8bit", "sgd", "muon"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]

LEARNING_RATE = 3e-3
"""For weights that begin at random, where none is given."""


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer and its schedule."""

    optimizer: Optimizer = "adamw"
    """adamw; adamw8bit, with a quarter of its state; sgd with momentum; or muon: matrices by orthogonal
    updates of AdamW's size, everything else and embeddings by AdamW."""
    learning_rate: float | None = None
    """Peak learning rate. Default: 0.003; 2e-5 for the weights of --model, 2e-4 for adapters on them."""
    schedule: Schedule = "cosine"
    """Learning rate after warm-up: cosine to a tenth; linear to zero; wsd, constant and then linear to
    zero in the last fifth of the run; or constant."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: a twentieth of the run, at most 1000."""
    weight_decay: float = 0.01
    """Weight decay of matrices, decoupled; with sgd an L2 penalty."""
    decay_biases: bool = False
    """Apply the weight decay to norms and biases too."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's averages: of the gradient, and of its square."""
    eps: float = 1e-8
    """Number that keeps AdamW from dividing by zero."""
    momentum: float | None = None
    """Momentum of sgd (default 0.9) and of muon (default 0.95)."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights in the checkpoints, with this decay: 0.999, say."""
    evaluate_ema: bool = False
    """Evaluate that average in place of the weights."""

    def __post_init__(self) -> None:
        positive("learning_rate", self.learning_rate)
        positive("eps", self.eps)
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            at_least(name, getattr(self, name), 0)
        fractions = (*(("betas", beta) for beta in self.betas), ("momentum", self.momentum))
        for name, value in (*fractions, ("ema_decay", self.ema_decay)):
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 0 and less than 1")
        if self.optimizer.startswith("adamw") and self.momentum is not None:
            raise ValueError(f"momentum is a setting of sgd and muon; {self.optimizer} has --betas")

    @property
    def peak_learning_rate(self) -> float:
        return LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def momentum_used(self) -> float:
        return self.momentum if self.momentum is not None else 0.95 if self.optimizer == "muon" else 0.9
