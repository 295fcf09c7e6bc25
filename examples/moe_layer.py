"""The MoE layer alone: a plain PyTorch loop, without the orchestrator.

python examples/moe_layer.py
"""

import torch
from torch import nn

from experts.balance import update_balance
from experts.moe.layer import MoELayer


class Net(nn.Module):
    """A regression with one MoE layer: seven experts of three sizes, two for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 32)
        self.moe = MoELayer(32, sizes=[16, 16, 16, 32, 32, 64, 64], top_k=2)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        y, routing = self.moe(x)
        return self.head(x + y), routing.balance, routing.counts_E


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 4)
    targets = inputs.prod(dim=1, keepdim=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(101):
        outputs, balance, counts_E = model(inputs)
        error = (outputs - targets).square().mean()
        # The balance loss is a sum over tokens, so that micro-batches add up: divide it by their number.
        (error + 0.01 * balance / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_balance(model, [counts_E])  # the next step's balance loss weighs by these counts
        if step % 20 == 0:
            print(f"step {step:3d}  error {error.item():.4f}  samples per expert {counts_E.tolist()}")


if __name__ == "__main__":
    main()
