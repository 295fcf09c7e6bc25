"""Tests of the model that callbacks look at: what they may do, and what is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.checkpoint.progress import Progress
from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.worker.shown_model import ShownModel


class Look:
    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look

    def on_model(self, moment: Any, model: nn.Module) -> None:
        self.look(model)


def show(model: nn.Module, look: Callable[[Any], Any], num_workers: int = 1, lockstep: bool = False) -> None:
    callbacks = CallbackRunner([Look(look)], raise_errors=True)
    callbacks.bind(Path("run"), Config(), lambda *_, **__: None)
    task: Any = None
    strategy = Strategy(model, task)
    strategy.lockstep = lockstep
    ShownModel(callbacks, strategy, num_workers)("step", Progress(step=7))


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def test_each_module_keeps_its_own_mode() -> None:
    model = small_model()
    model[1].eval()
    show(model, lambda shown: shown.train())
    assert [module.training for module in model] == [True, False, True]


def test_a_pass_changes_neither_the_random_state_nor_the_statistics() -> None:
    model = small_model()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    show(model, lambda shown: shown(torch.randn(5, 3)))
    assert torch.equal(torch.rand(2), expected)


def replace_weight(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model[0].bias.add_(1), "0.bias"),
        (lambda model: nn.init.zeros_(model[1].weight), "1.weight"),
        (lambda model: model.train()(torch.randn(5, 3)), "1.num_batches_tracked"),
        (replace_weight, "0.weight"),
        (lambda model: model.register_buffer("more", torch.zeros(1)), "more"),
    ],
)
def test_a_changed_tensor_is_named(change: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(UserError, match=f"a callback has changed '{name}' .* after step 7"):
        show(small_model(), change)


def test_a_pass_that_would_wait_for_other_workers_is_refused() -> None:
    model = small_model()
    with pytest.raises(TaskFailed, match="on_model called Linear: the model is spread over 2 workers"):
        show(model, lambda shown: shown[0](torch.randn(5, 3)), num_workers=2, lockstep=True)
    show(model, lambda shown: shown[0](torch.randn(5, 3)), num_workers=2)
    assert model(torch.randn(5, 3)).shape == (5, 4)


@pytest.fixture
def sharded_model() -> Iterator[nn.Module]:
    """A model whose weight is divided between this worker and another, which does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = nn.Linear(3, 4)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    yield model
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "look",
    [
        lambda model: model.weight.square().sum().full_tensor(),
        lambda model: model.weight[0].full_tensor(),
        lambda model: model.weight.norm().item(),
    ],
)
def test_computing_with_shards_is_refused(sharded_model: nn.Module, look: Callable[[Any], Any]) -> None:
    """The other workers do not take part, and a number of one shard is not that of the parameter."""
    with pytest.raises(TaskFailed, match=r"parameter\.to_local\(\)"):
        show(sharded_model, look, num_workers=2, lockstep=True)


def test_the_own_part_of_a_shard_and_other_modules_may_be_used(sharded_model: nn.Module) -> None:
    seen: list[float] = []

    def look(model: Any) -> None:
        part = model.weight.to_local()
        seen.append(nn.MSELoss()(part, torch.zeros_like(part)).item())

    show(sharded_model, look, num_workers=2, lockstep=True)
    assert len(seen) == 1


def test_a_pass_may_replace_a_buffer_that_is_not_saved() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = torch.ones(len(x))
            return x + self.table

    show(Positions(), lambda model: model(torch.zeros(3)))
