"""The parts of a whole step on a GPU: our AdamW against torch's, copies of weights against casts, and the
loss in chunks against whole logits."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.balance import moe_layers
from experts.kernels import launching
from harness.runs.steppers import Events, mean_loss, weights
from orchestrator.config.settings import Config
from orchestrator.tasks import token_loss as token_loss_module
from orchestrator.tasks.cross_entropy import loss_and_gradient_fused, loss_and_gradient_plain
from orchestrator.tasks.token_loss import token_loss
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from orchestrator.train.optim import adamw, gradient_norm
from orchestrator.train.optim.adamw import AdamW, Update, update_fused, update_plain
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not launching.available(), reason="needs a CUDA device and Triton"),
]

DEVICE = "cuda:0"
BETAS = (0.9, 0.999)
EPS = 1e-8
SIZES = [1, 2047, 2048 * 3, 100_003]
MOE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 7,
    "expert_hidden_size": (64,),
    "width": 128,
    "layers": 2,
    "sequence_length": 128,
    "batch_size": 16,
    "precision": "bf16",
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE)


def make_update(size: int, dtype: torch.dtype, has_copy: bool) -> Update:
    copy = draw(size).bfloat16() if has_copy else None
    gradient = draw(size, seed=1).to(dtype)
    return Update(draw(size, seed=2), gradient, draw(size, seed=3), draw(size, seed=4).square(), copy)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_copy", [True, False])
def test_the_kernel_equals_the_update_in_plain_torch(size: int, dtype: torch.dtype, has_copy: bool) -> None:
    numbers_N = torch.tensor([1e-2, 0.3, 1e-4, 0.25, 0.0], device=DEVICE)
    found, expected = (make_update(size, dtype, has_copy) for _ in range(2))
    update_fused(found, numbers_N, BETAS, EPS)
    update_plain(expected, numbers_N, BETAS, EPS)
    for name in ("weight", "mean", "square"):
        # The kernel rounds a product and a sum once (FMA), torch twice: it shows where a sum cancels.
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=1e-6)
    if found.copy is not None:
        assert torch.equal(found.copy, found.weight.bfloat16())


def test_the_kernel_writes_nothing_where_gradients_overflowed() -> None:
    numbers_N = torch.tensor([1e-2, 0.3, 1e-4, float("nan"), 1.0], device=DEVICE)
    found, expected = (make_update(5000, torch.float32, has_copy=True) for _ in range(2))
    update_fused(found, numbers_N, BETAS, EPS)
    for name in ("weight", "mean", "square", "copy"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_large_and_small_gradients_is_exact(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_norm, "LARGE", 1000)
    shapes = ((3, 50, 70), (11,), (2**15 * 3 + 17,), (1000,), (64, 64))
    gradients = [draw(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    transposed = gradients[-1].t()
    found = gradient_norm.norm_of_gradients([*gradients[:-1], transposed])
    every = torch.cat([gradient.double().flatten() for gradient in gradients])
    torch.testing.assert_close(found, every.norm(), rtol=1e-6, atol=0)
    gradients[0][1, 2, 3] = float("inf")
    assert float(gradient_norm.norm_of_gradients(gradients)) == float("inf")


@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_twenty_steps_equal_those_of_torch(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", 1000)
    shapes = ((3, 50, 70), (11,), (200, 6))
    mine, other = ([nn.Parameter(draw(*shape)) for shape in shapes] for _ in range(2))
    ours = AdamW([{"params": mine, "weight_decay": 0.1}], 1e-2, BETAS, EPS)
    theirs = torch.optim.AdamW(other, lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
    for step in range(20):
        for optimizer in (ours, theirs):
            value = 1e-2 / (step + 1)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(value, device=DEVICE) if rate == "tensor" else value
        for parameter, expected in zip(mine, other, strict=True):
            expected.grad = draw(*parameter.shape, seed=step)
            parameter.grad = expected.grad * 4
        ours.gradient_factor = torch.tensor(0.25, device=DEVICE, dtype=torch.float64)
        ours.step()
        theirs.step()
    for parameter, expected in zip(mine, other, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
        assert ours.state[parameter].keys() == theirs.state[expected].keys()
        assert ours.state[parameter]["step"].device == theirs.state[expected]["step"].device


@pytest.mark.parametrize(
    ("vocabulary", "columns"), [(7, 7), (7, 64), (4096, 4096), (4090, 4160), (5000, 5000), (32_000, 32_000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_kernel_equals_plain_torch(vocabulary: int, columns: int, dtype: torch.dtype) -> None:
    logits_CP = (draw(37, columns) * 5).to(dtype)
    logits_CP[:, vocabulary:] = torch.nan  # they have no part in the loss
    targets_C = torch.randint(vocabulary, (37,), device=DEVICE)
    loss_C, gradient_CP = loss_and_gradient_plain(logits_CP, targets_C, vocabulary)
    found_C, found_CP = loss_and_gradient_fused(logits_CP.clone(), targets_C, vocabulary)
    torch.testing.assert_close(found_C, loss_C, rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found_CP, gradient_CP, rtol=tolerance, atol=1e-6)
    assert not found_CP[:, vocabulary:].any()


@pytest.mark.parametrize("vocabulary", [5000, 5003])
def test_the_loss_in_chunks_equals_that_of_whole_logits(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_loss_module, "CHUNK_LOGITS", 256 * 5000)
    hidden_TD = draw(1000, 64).requires_grad_()
    output_VD = draw(vocabulary, 64, seed=1).requires_grad_()
    targets_T = torch.randint(vocabulary, (1000,), device=DEVICE)
    leaves = (hidden_TD, output_VD)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = token_loss(hidden_TD, output_VD, targets_T).sum
        logits_TV = hidden_TD @ output_VD.T
    expected = F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    pairs = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for gradient, other in pairs:
        assert float((gradient - other).norm()) < 1e-2 * float(other.norm())


def test_training_with_the_loss_in_chunks_equals_training_with_whole_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepper, feed = build(**MOE, compile="off")
    expected = train(stepper, feed)
    monkeypatch.setattr(token_loss_module, "LARGE_LOGITS", 1)
    stepper, feed = build(**MOE, compile="off")
    assert train(stepper, feed) == pytest.approx(expected, rel=2e-3)


def build(**settings: Any) -> tuple[Stepper, Feed]:
    config = Config.of(**settings)
    prepared = Trainer(config=config, quiet=True).prepare()
    world = World.single_process(prepared.plan.device.value)
    parts = build_parts(config, prepared.plan, prepared.task, world)
    stepper = build_stepper(config, world, parts, prepared.plan.batch_size.value, Events())
    return stepper, build_feed(prepared.resolved.config, prepared.plan, prepared.task, world)


def train(stepper: Stepper, feed: Feed, steps: int = 8) -> list[float]:
    return [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(islice(feed.steps(0), steps))]


def test_training_with_copies_equals_training_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", 1000)
    copied, feed = build(**MOE, compile="off")
    banks = [layer.bank for _, layer in moe_layers(copied.strategy.model)]
    assert copied.copies is not None
    assert all(len(bank.copies) == 2 for bank in banks)
    found = train(copied, feed)
    stacks = [stack for bank in banks for _, _, stack in bank.stacks()]
    assert {stack.grad.dtype for stack in stacks if stack.grad is not None} == {torch.bfloat16}
    plain, feed = build(**MOE, compile="off")
    plain.copies = None
    for _, layer in moe_layers(plain.strategy.model):
        layer.bank.copies = {}
    assert found == pytest.approx(train(plain, feed), rel=1e-5)
    others = weights(plain.strategy.model)
    for name, weight in weights(copied.strategy.model).items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-3, msg=name)


def test_compiled_training_with_copies_and_chunks_follows_the_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adamw, "LARGE", 1000)
    stepper, feed = build(**MOE, compile="off")
    expected = train(stepper, feed)
    monkeypatch.setattr(token_loss_module, "LARGE_LOGITS", 1)
    stepper, feed = build(**MOE, compile="on")
    assert train(stepper, feed) == pytest.approx(expected, rel=2e-3)


def test_a_step_with_copies_does_not_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", 1000)
    stepper, feed = build(**MOE)
    batches = list(islice(feed.steps(0), 4))
    stepper.run(batches[0], 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches[1:], 1):
            stepper.run(batch, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
