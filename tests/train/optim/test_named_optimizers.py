"""Optimizers by name against torch's own, and the average of weights against its recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experts.moe.bank import ExpertBank, ExpertForm
from orchestrator.checkpoint.files import AVERAGE_SLOT
from orchestrator.config.sections.optim import OptimSettings
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.muon import orthogonalized
from orchestrator.train.optim.named_optimizers import build_named_optimizer, check_owns_groups
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.optim.weight_average import WeightAverage, drop_average

STEPS = 20


class Net(nn.Module):
    """An embedding, a tall and a wide matrix with biases, a norm, and experts of two sizes with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.tall = nn.Linear(4, 9)
        self.wide = nn.Linear(9, 4)
        self.norm = nn.LayerNorm(4)
        self.bank = ExpertBank(4, (3, 6, 3), ExpertForm(bias=True))


def make_net() -> Net:
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def gradient_of(name: str, step: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + step)
    return torch.randn(like.shape, generator=generator)


def factor(step: int) -> float:
    """The schedule: another learning rate in each step."""
    return 1 / (1 + step)


def train(net: Net, settings: OptimSettings) -> None:
    optimizer = ScheduledOptimizer(build_named_optimizer(net, settings, fused=False), factor)
    for step in range(STEPS):
        for name, parameter in net.named_parameters():
            parameter.grad = gradient_of(name, step, parameter)
        optimizer.step(step, None)


def reference_weights(settings: OptimSettings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Train each weight with torch's own optimizer; of a stack of experts each by itself."""
    # Torch's Muon computes in bf16; in the precision of the weights it is the same algorithm.
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)
    trained: dict[str, Tensor] = {}
    for name, parameter in make_net().named_parameters():
        is_stack = name.startswith("bank")
        parts = list(parameter.detach().clone().unbind() if is_stack else [parameter.detach().clone()])
        for row, part in enumerate(parts):
            weight = nn.Parameter(part)
            optimizer = reference_optimizer(name, weight, settings)
            for step in range(STEPS):
                gradient = gradient_of(name, step, parameter)
                weight.grad = gradient[row] if is_stack else gradient
                optimizer.param_groups[0]["lr"] = settings.peak_learning_rate * factor(step)
                optimizer.step()
            parts[row] = weight.detach()
        trained[name] = torch.stack(parts) if is_stack else parts[0]
    return trained


def reference_optimizer(name: str, weight: nn.Parameter, settings: OptimSettings) -> torch.optim.Optimizer:
    lr = settings.peak_learning_rate
    decay = settings.weight_decay if weight.ndim > 1 or settings.decay_biases else 0.0
    if settings.optimizer == "sgd":
        return torch.optim.SGD([weight], lr=lr, momentum=settings.momentum_used, weight_decay=decay)
    if settings.optimizer == "muon" and weight.ndim > 1 and name != "embedding.weight":
        return torch.optim.Muon(
            [weight],
            lr=lr,
            weight_decay=decay,
            momentum=settings.momentum_used,
            adjust_lr_fn="match_rms_adamw",
        )
    return torch.optim.AdamW([weight], lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"betas": (0.8, 0.95), "eps": 1e-5, "decay_biases": True},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.0},
        {"optimizer": "muon"},
        {"optimizer": "muon", "momentum": 0.8, "betas": (0.8, 0.95)},
    ],
)
def test_twenty_steps_equal_those_of_the_reference(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Config.of(**{"learning_rate": 0.02, "weight_decay": 0.1} | changed).optim
    net = make_net()
    train(net, settings)
    expected = reference_weights(settings, monkeypatch)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_an_orthogonalized_matrix_has_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 5), (3, 8), (8, 3), (2, 6, 4)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=generator)))
        assert 0.5 < float(values.min()) < float(values.max()) < 1.3
    assert orthogonalized(torch.zeros(2, 3)).eq(0).all(), "an expert without tokens has no direction"


def test_only_what_requires_a_gradient_is_trained_in_the_same_groups_on_every_host() -> None:
    net = nn.Linear(3, 2)
    net.weight.requires_grad_(False)
    for name, num_groups in (("adamw", 2), ("adamw8bit", 2), ("sgd", 2), ("muon", 3)):
        settings = Config.of(optimizer=name, learning_rate=0.5, weight_decay=0.25).optim
        optimizer = build_named_optimizer(net, settings, fused=False)
        assert [len(group["params"]) for group in optimizer.param_groups] == [0] * (num_groups - 1) + [1]
        assert optimizer.param_groups[-1]["weight_decay"] == 0.0
        net.bias.grad = torch.ones(2)
        optimizer.step()


class Around(torch.optim.Optimizer):
    """A task's own optimizer that contains another one, and shares its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.inner = inner
        self.param_groups = inner.param_groups


def test_an_optimizer_around_another_does_not_own_its_groups() -> None:
    inner = torch.optim.SGD(make_net().parameters(), lr=0.1)
    check_owns_groups(inner)
    with pytest.raises(UserError, match=r"optimizer Around contains another optimizer.+use --sharding none"):
        check_owns_groups(Around(inner))


class NoState(torch.optim.Optimizer):
    """Steps along the gradient, without any state, as a task's own optimizer may."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            assert not self.state[parameter].keys() - {AVERAGE_SLOT}
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd", "muon", "own"])
def test_the_average_follows_its_recurrence(name: str) -> None:
    net = make_net()
    if name == "own":
        inner: torch.optim.Optimizer = NoState(net.parameters(), {"lr": 0.01})
    else:
        settings = Config.of(optimizer=name, momentum=0.0 if name == "sgd" else None).optim
        inner = build_named_optimizer(net, settings, fused=False)
    average = WeightAverage(inner, 0.9, evaluated=True)
    optimizer = ScheduledOptimizer(inner, lambda _: 1.0, average=average)
    expected: dict[str, Tensor] = {}
    for step in range(5):
        for key, parameter in net.named_parameters():
            parameter.grad = gradient_of(key, step, parameter)
        optimizer.step(step, None)
        for key, parameter in net.named_parameters():
            weight = parameter.detach().clone()
            expected[key] = 0.9 * expected[key] + 0.1 * weight if step else weight
    weights = {key: parameter.detach().clone() for key, parameter in net.named_parameters()}
    with average.in_place_of_weights(net):
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[key], rtol=1e-5, atol=1e-6)
    for key, parameter in net.named_parameters():
        assert torch.equal(parameter.detach(), weights[key])
        torch.testing.assert_close(inner.state[parameter][AVERAGE_SLOT], expected[key], rtol=1e-5, atol=1e-6)
    drop_average(inner)
    assert all(AVERAGE_SLOT not in state for state in inner.state.values())


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_average_begins_after_the_first_step_that_is_not_skipped(name: str) -> None:
    """Until then the optimizer has no state of a parameter, and makes it in its first step."""
    net = make_net()
    inner = build_named_optimizer(net, Config.of(optimizer=name).optim, fused=False)
    optimizer = ScheduledOptimizer(inner, lambda _: 1.0, average=WeightAverage(inner, 0.9))
    for step, finite in enumerate((False, True)):
        for key, parameter in net.named_parameters():
            parameter.grad = gradient_of(key, step, parameter)
        net.norm.bias.grad = None
        optimizer.step(step, torch.tensor(finite))
        assert all(
            (AVERAGE_SLOT in inner.state[p]) == (finite and p.grad is not None) for p in net.parameters()
        )


def test_linear_and_wsd_schedules_end_at_zero() -> None:
    linear = warmup_schedule("linear", 10, 110)
    assert [linear(step) for step in (9, 10, 60, 110, 200)] == [10 / 11, 1.0, 0.5, 0.0, 0.0]
    wsd = warmup_schedule("wsd", 10, 100)
    assert [wsd(step) for step in (4, 10, 80, 90, 100, 200)] == pytest.approx([5 / 11, 1, 1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("dtype", "kind", "rate"),
    [(torch.float32, AdamW, float(torch.tensor(1e-3))), (torch.float64, torch.optim.AdamW, 1e-3)],
    ids=str,
)
def test_nothing_is_rounded_to_fp32_for_fp64_weights_on_a_gpu(
    dtype: torch.dtype, kind: type, rate: float
) -> None:
    """Shards on a GPU, and those that are offloaded to a CPU, train as whole weights on a GPU do."""
    with FakeTensorMode():
        net = nn.Module()
        net.weight = nn.Parameter(torch.empty(2, 2, device="cuda", dtype=dtype))
        inner = build_named_optimizer(net, Config.of(learning_rate=1e-3).optim, fused=True)
        optimizer = ScheduledOptimizer(inner, lambda _: 1.0)
    optimizer.set_rates(0)
    assert type(inner) is kind
    assert inner.param_groups[0]["lr"] == rate
