"""Your own code during a run, and metrics with a state.

python examples/callback_and_metric.py
"""

from typing import Any

import torch
from torch import nn

from orchestrator import AUC, Callback, Config, Loss, Metric, Request, Trainer


class Confidence(Metric):
    """The mean probability of the chosen class over the validation data."""

    probabilities: Any

    def __init__(self) -> None:
        super().__init__("max")
        self.add_state("probabilities", reduce="gather")

    def update(self, logits: torch.Tensor) -> None:
        self.probabilities.append(logits.softmax(-1).amax(-1))

    def compute(self) -> torch.Tensor:
        return self.probabilities.mean()


class StopWhenGood(Callback):
    """Ends the run at an area under the ROC curve, and keeps the losses."""

    def __init__(self, auc: float) -> None:
        self.auc = auc
        self.losses: list[float] = []

    def on_step(self, step) -> None:
        self.losses.append(step.loss)

    def on_evaluate(self, evaluation) -> Request | None:
        auc = evaluation.metrics["auc"]
        print(f"step {evaluation.step}: auc {auc:.4f}, confidence {evaluation.metrics['confidence']:.3f}")
        return Request(stop=f"auc above {self.auc}") if auc > self.auc else None


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    inputs, labels = batch
    logits = model(inputs)
    total = nn.functional.cross_entropy(logits, labels, reduction="sum")
    scores = logits[:, 1] - logits[:, 0]
    return Loss(total, len(labels), {"auc": (scores, labels), "confidence": (logits,)})


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3000, 8)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    watch = StopWhenGood(auc=0.95)
    trainer = Trainer(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)),
        data=(inputs[:2000], labels[:2000]),
        validation=(inputs[2000:], labels[2000:]),
        loss=loss,
        metrics={"auc": AUC(), "confidence": Confidence()},
        callbacks=[watch],
        config=Config.of(epochs=40, learning_rate=1e-2, name="callback", early_stopping_metric="auc"),
        quiet=True,
    )
    result = trainer.fit()
    print(f"{result.summary['reason']} after {len(watch.losses)} steps")


if __name__ == "__main__":
    main()
