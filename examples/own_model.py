"""Your own model, data and loss.

python examples/own_model.py
"""

import torch
from torch import nn

from orchestrator import Config, Loss, Trainer


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of two spirals, and the spiral of each."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + torch.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points, label


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """Return sums over the batch: so the result does not depend on how a batch is divided."""
    points, label = batch
    logits = model(points)
    total = nn.functional.cross_entropy(logits, label, reduction="sum")
    correct = (logits.argmax(-1) == label).sum()
    return Loss(total, len(label), {"accuracy": correct})


def main() -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    trainer = Trainer(
        model,
        data=spirals(2000, seed=0),
        validation=spirals(500, seed=1),
        loss=loss,
        config=Config.of(epochs=4, learning_rate=2e-2, name="own-model"),
    )
    print("batch size:", trainer.prepare().plan.batch_size.reason)
    result = trainer.fit()
    print("validation:", result.summary["validation"])
    with torch.no_grad():  # the model holds the best weights
        print("spiral of (0.5, 0.1):", int(model(torch.tensor([[0.5, 0.1]])).argmax()))


if __name__ == "__main__":
    main()
