"""Families of ``transformers`` with our kernels on a GPU, against their own eager code in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experts.transformers.registration import use
from harness.lm.families import FAMILIES, build, tokens

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the mean loss. A router in bf16 may choose other experts in a tie."""


def mean_loss(model: Any) -> torch.Tensor:
    ids = tokens(16).cuda()
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_that_of_the_eager_code(name: str, dtype: torch.dtype) -> None:
    expected = float(mean_loss(build(name).cuda()).detach())
    loss = mean_loss(use(build(name, dtype).cuda()))
    assert float(loss.detach()) == pytest.approx(expected, rel=TOLERANCE[dtype])
    loss.backward()


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-OSS"])
def test_gradients_of_experts_are_those_of_the_eager_code_in_fp32(name: str) -> None:
    eager = build(name, torch.float32).cuda()
    mean_loss(eager).backward()
    hosted = use(build(name, torch.float32).cuda())
    mean_loss(hosted).backward()
    for (key, expected), layer in zip(eager_down(eager), hosted_down(hosted), strict=True):
        ours = layer if name == "GPT-OSS" else layer.transpose(1, 2)
        off = float((ours - expected).norm() / expected.norm())
        assert off <= 1e-4, key


def eager_down(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, p.grad) for key, p in model.named_parameters() if key.endswith("experts.down_proj")]


def hosted_down(model: Any) -> list[torch.Tensor]:
    return [
        p.grad for key, p in model.named_parameters() if ".hosted.bank.down_" in key and "bias" not in key
    ]
