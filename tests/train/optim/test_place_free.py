"""Optimizers whose bits depend neither on the place of an element nor on the size of its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.named_optimizers import ElementwiseSGD
from orchestrator.train.optim.weight_average import WeightAverage

SIZE = 131
"""Elements of the whole tensor: the body of a vector loop, and a tail."""
PARTS = [(begin, begin + length) for begin in range(40) for length in (1, 2, 3, 7, 8, 15, 17, 31, 33, 64, 91)]

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW([{"params": parameters, "weight_decay": 0.1}], 1e-2, (0.9, 0.99), 1e-8, lambda: ())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ElementwiseSGD([{"params": parameters, "weight_decay": 0.1}], lr=1e-2, momentum=0.9)


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW8bit([{"params": parameters, "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def trained(build: Build, weights: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the weights after some steps, and their averages."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build(parameters)
    average = WeightAverage(optimizer, 0.9, place_free=True)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        if isinstance(optimizer, AdamW):
            optimizer.gradient_factor = torch.tensor(0.37, dtype=torch.float64)
        optimizer.step()
        average.update()
    averages = [optimizer.state[parameter][AVERAGE_SLOT] for parameter in parameters]
    return [torch.stack([p.detach(), a]) for p, a in zip(parameters, averages, strict=True)]


def differences(build: Build, dtype: torch.dtype = torch.float32) -> int:
    """Count the parts of a vector whose weights depend on where the part begins and ends."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(4, SIZE, generator=generator).to(dtype)
    (whole,) = trained(build, [weight], [[gradient] for gradient in gradients])
    parts = trained(build, [weight[a:b] for a, b in PARTS], [[g[a:b] for a, b in PARTS] for g in gradients])
    return sum(not torch.equal(part, whole[:, a:b]) for part, (a, b) in zip(parts, PARTS, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("build", [adamw, sgd, adamw_8bit])
def test_a_part_has_the_bits_of_the_whole(build: Build, dtype: torch.dtype) -> None:
    assert differences(build, dtype) == 0


def test_torchs_kernel_rounds_the_last_elements_in_another_way() -> None:
    assert differences(fused_adamw) > 0


def test_the_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(4, SIZE, generator=generator).double()
    torchs: dict[Build, Any] = {
        adamw: lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
        sgd: lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    }
    for build, expected in torchs.items():
        scale = 0.37 if build is adamw else 1.0
        found = trained(build, [weight], [[gradient] for gradient in gradients])
        reference = trained(expected, [weight], [[gradient * scale] for gradient in gradients])
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
