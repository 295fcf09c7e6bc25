"""On a GPU: the kernel of the exact norm, and optimizers that round an element alike at any place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from orchestrator.train.optim import gradient_norm
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.named_optimizers import ElementwiseSGD

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_adds_up_the_integers_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    for size in (1, 7, 2048, 32_768, 1_000_003):
        gradient = torch.randn(size, generator=generator, device=CUDA).to(dtype)
        gradient[0] = 0.5  # a number between two integers of a coarse grid is rounded to the even one
        for scale in (2.0**28, 1.0, 3.0):
            factor = torch.tensor(scale, dtype=torch.float64, device=CUDA)
            on_cpu = gradient_norm._halves(gradient.cpu(), factor.cpu())
            assert gradient_norm._halves(gradient, factor).tolist() == on_cpu.tolist(), (size, scale)


def test_the_square_is_that_of_the_cpu() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    gradients = [torch.randn(size, generator=generator, device=CUDA) for size in (5, 3_000_000, 77)]
    on_cpu = gradient_norm.exact_square([each.cpu() for each in gradients], torch.device("cpu"))
    assert gradient_norm.exact_square(gradients, CUDA).item() == on_cpu.item()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW([{"params": parameters, "weight_decay": 0.1}], 1e-2, (0.9, 0.99), 1e-8, lambda: ())


def adamw_of_stacks(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    ids = {id(parameter) for parameter in parameters}
    return AdamW([{"params": parameters, "weight_decay": 0.1}], 1e-2, (0.9, 0.99), 1e-8, lambda: ids)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ElementwiseSGD([{"params": parameters, "weight_decay": 0.1}], lr=1e-2, momentum=0.9)


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW8bit([{"params": parameters, "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)


@pytest.mark.parametrize("build", [adamw, adamw_of_stacks, sgd, adamw_8bit])
def test_a_part_has_the_bits_of_the_whole(build: Build) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    weight, *gradients = torch.randn(4, 70_001, generator=generator, device=CUDA)
    bounds = [
        (a, a + n) for a in (0, 1, 3, 4, 17, 2048, 30_000) for n in (1, 2, 3, 5, 64, 2047, 4096, 40_001)
    ]
    whole = nn.Parameter(weight.clone())
    parts = [nn.Parameter(weight[a:b].clone()) for a, b in bounds]
    for parameters in ([whole], parts):
        optimizer = build(parameters)
        for gradient in gradients:
            for parameter, (a, b) in zip(parameters, bounds, strict=False):
                parameter.grad = gradient.clone() if parameter is whole else gradient[a:b].clone()
            if isinstance(optimizer, AdamW):
                optimizer.gradient_factor = torch.tensor(0.37, dtype=torch.float64, device=CUDA)
            optimizer.step()
    for part, (a, b) in zip(parts, bounds, strict=True):
        assert torch.equal(part, whole[a:b]), (a, b)
