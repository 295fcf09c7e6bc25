"""Training with copies of weights in bf16 against training that casts them in each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from experts.balance import moe_layers
from experts.moe.weight_copy import WeightCopy
from harness.fakes.inventories import gpu, machine, model
from harness.runs.steppers import make_stepper, mean_loss, run_steps, weights
from orchestrator.config.settings import Config
from orchestrator.plan.planning import plan
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.train.data.steps import Feed
from orchestrator.train.device.compiling import Compiled
from orchestrator.train.group.world import World
from orchestrator.train.optim import adamw, named_optimizers
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.weight_average import WeightAverage
from orchestrator.train.optim.weight_copies import WeightCopies
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build_model import build_parts

SETTINGS = {"width": 16, "layers": 2, "sequence_length": 8, "vocabulary": 16, "samples": 64}
STEPS = 4


@pytest.fixture(autouse=True)
def ours_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our AdamW on a CPU, with every parameter large."""
    monkeypatch.setattr(adamw, "LARGE", 1)
    monkeypatch.setattr(
        named_optimizers,
        "build_adamw",
        lambda groups, settings, *_: AdamW(groups, settings.peak_learning_rate, settings.betas, settings.eps),
    )


def make(copies: bool, micro_batch: int = 8) -> tuple[Stepper, Feed]:
    task = Synthetic(Config.of(experts=7, expert_hidden_size=(8,), top_k=2, **SETTINGS))
    stepper, feed = make_stepper(task, micro_batch, 8, precision="bf16")
    assert stepper.copies is not None
    if not copies:
        stepper.copies.drop()
        stepper.copies = None
    return stepper, feed


def assert_equal_runs(found: Stepper, expected: Stepper) -> None:
    theirs = weights(expected.strategy.model)
    for name, weight in weights(found.strategy.model).items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("micro_batch", [8, 4, 3])
def test_losses_norms_and_weights_are_equal_to_the_bit(micro_batch: int) -> None:
    plain, feed = make(copies=False, micro_batch=micro_batch)
    copied, other_feed = make(copies=True, micro_batch=micro_batch)
    expected = run_steps(plain, feed, STEPS)
    found = run_steps(copied, other_feed, STEPS)
    assert [mean_loss(totals) for totals in found] == [mean_loss(totals) for totals in expected]
    for totals, other in zip(found, expected, strict=True):
        assert totals.norm is not None
        assert other.norm is not None
        assert float(totals.norm) == pytest.approx(float(other.norm), rel=1e-6)
    assert_equal_runs(copied, plain)
    short = torch.bfloat16 if micro_batch == 8 else torch.float32
    stacks = [stack for _, layer in moe_layers(copied.strategy.model) for _, _, stack in layer.bank.stacks()]
    assert {stack.grad.dtype for stack in stacks if stack.grad is not None} == {short}


def test_a_step_that_is_repeated_in_smaller_passes_sums_in_fp32() -> None:
    plain, feed = make(copies=False)
    copied, other_feed = make(copies=True)
    for stepper in (plain, copied):
        stepper._recovery.shrink_passes("halve", 0)
    run_steps(plain, feed, 2)
    run_steps(copied, other_feed, 2)
    assert_equal_runs(copied, plain)


def test_the_average_in_place_of_the_weights_is_computed_with() -> None:
    copied, feed = make(copies=True)
    average = WeightAverage(copied.optimizer.inner, decay=0.5)
    copied.optimizer.average = average
    run_steps(copied, feed, STEPS)
    model = copied.strategy.model
    tokens = torch.arange(8).unsqueeze(0)

    def logits() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(tokens)[0]

    of_weights = logits()
    with average.in_place_of_weights(model):
        of_average = logits()
        for _, layer in moe_layers(model):
            layer.bank.copies = {}
        assert torch.equal(of_average, logits())
    assert not torch.equal(of_average, of_weights)


def test_experts_that_were_replaced_get_copies_of_their_own() -> None:
    copied, feed = make(copies=True)
    run_steps(copied, feed, 1)
    for _, layer in moe_layers(copied.strategy.model):
        bank = layer.bank
        kept = bank.copies["down_8"]
        replaced = torch.nn.Parameter(bank.get_parameter("up_8").detach().clone())
        groups = copied.optimizer.inner.param_groups
        for group in groups:
            group["params"] = [replaced if p is bank.get_parameter("up_8") else p for p in group["params"]]
        bank.register_parameter("up_8", replaced)
        copied.experts_changed()
        assert bank.copies["up_8"].parameter is replaced
        assert bank.copies["down_8"] is kept
    run_steps(copied, feed, 1)


def test_banks_that_layers_share_have_no_copies() -> None:
    task = Synthetic(Config.of(experts=4, expert_hidden_size=(8,), top_k=2, **SETTINGS))
    stepper, _ = make_stepper(task, 8, 8, precision="bf16")
    (_, first), (_, second) = moe_layers(stepper.strategy.model)
    assert stepper.copies is not None
    stepper.copies.drop()
    second.bank = first.bank
    inner = stepper.optimizer.inner
    assert isinstance(inner, AdamW)
    WeightCopies(stepper.strategy.model, inner, torch.bfloat16)
    assert not first.bank.copies


def test_compiled_code_computes_with_weights_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code stands for compiled code, which refreshes nothing itself."""

    def compiled_call(call: Callable[..., Any], mode: str | None, dynamic: bool | None) -> Callable[..., Any]:
        del mode, dynamic

        def run(*arguments: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(WeightCopy, "refresh", lambda _: None)
                return call(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", compiled_call)
    stepper, _ = make(copies=True)
    plain, _ = make(copies=False)
    compiled = Compiled(stepper.strategy.model, "default", "all", stepper.copies)
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (stepper.strategy.model, plain.strategy.model):
            for parameter in model.parameters():
                parameter.mul_(0.5)
        found, expected = (model(tokens)[0] for model in (stepper.strategy.model, plain.strategy.model))
    compiled.close()
    assert torch.equal(found, expected)


def test_a_graph_repeats_a_step_with_weights_that_were_written() -> None:
    stepper, feed = make(copies=True)
    copies = [copy for _, layer in moe_layers(stepper.strategy.model) for copy in layer.bank.copies.values()]
    current: list[bool] = []

    class Graphs:
        """Stands for graphs: looks at the copies when a step would be repeated."""

        is_on = True

        def run(self, *_: Any) -> None:
            current.extend(torch.equal(copy.weights, copy.parameter.bfloat16()) for copy in copies)

    graphs: Any = Graphs()
    stepper.graphs = graphs
    with torch.no_grad():
        for copy in copies:
            copy.parameter.mul_(0.5)
    run_steps(stepper, feed, 1)
    assert current == [True] * len(copies)


def test_a_stack_whose_gradient_a_task_looks_at_has_no_copy() -> None:
    stepper, feed = make(copies=False)
    (_, first), *_ = moe_layers(stepper.strategy.model)
    _, _, stack = next(first.bank.stacks())
    seen: list[torch.dtype] = []
    stack.register_hook(lambda gradient: seen.append(gradient.dtype))
    inner = stepper.optimizer.inner
    assert isinstance(inner, AdamW)
    stepper.copies = WeightCopies(stepper.strategy.model, inner, torch.bfloat16)
    run_steps(stepper, feed, 2)
    assert len(seen) == 2
    assert len(first.bank.copies) == 1  # the other stack


def test_a_model_that_was_trained_computes_with_its_weights() -> None:
    """Torch's fused optimizers write weights without a sign that a copy would notice."""
    stepper, feed = make(copies=True)
    run_steps(stepper, feed, 2)
    assert stepper.copies is not None
    stepper.copies.drop()
    for _, layer in moe_layers(stepper.strategy.model):
        assert not layer.bank.copies
        assert {p.grad_dtype for p in layer.bank.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("gpus", "has_copies"), [(1, True), (2, False)])
def test_a_probe_of_one_worker_among_several_has_no_copies(
    gpus: int, has_copies: bool, precision: str
) -> None:
    """Its measured memory is that of the run, whose workers have none."""
    settings: dict[str, Any] = {"experts": 4, "expert_hidden_size": (8,), "precision": precision, **SETTINGS}
    config = Config.of(task="synthetic", parallel_strategy="data_parallel", **settings)
    chosen = plan(config, machine(*(gpu(index) for index in range(gpus))), model())
    assert chosen.workers.value == gpus
    parts = build_parts(config, chosen, Synthetic(config), World.single_process("cpu"))
    assert (parts.copies is not None) == has_copies
