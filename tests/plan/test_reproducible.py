"""Models and tasks that --reproducible refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from harness.fakes.inventories import gpu, machine, model, planned
from harness.runs.tiny_model import Tiny
from orchestrator import Config, Trainer
from orchestrator.errors import UserError

OWN = model(own_optimizer=True)
HOSTS: dict[str, Any] = {"parallel_strategy": "expert_parallel", "workers": 2}
DATA: dict[str, Any] = {"parallel_strategy": "data_parallel", "workers": 2}


def refusal(**settings: Any) -> str:
    here = machine(gpu(), gpu(1))
    with pytest.raises(UserError, match="--reproducible cannot serve the optimizer") as raised:
        planned(here, OWN, reproducible=True, **settings)
    return str(raised.value)


def test_an_optimizer_of_the_task_is_refused_where_workers_have_parts_of_tensors():
    assert "with --parallel-strategy expert_parallel" in refusal(**HOSTS)
    assert "with --sharding zero2" in refusal(**HOSTS, sharding="zero2")
    assert "with --sharding zero3" in refusal(**DATA, sharding="zero3")


def test_an_optimizer_of_the_task_is_taken_where_workers_have_whole_tensors():
    here = machine(gpu(), gpu(1))
    whole = planned(here, OWN, reproducible=True, **DATA, sharding="none")
    assert whole.workers.value == 2
    assert planned(machine(), OWN, reproducible=True).workers.value == 1
    assert planned(here, OWN, **HOSTS).workers.value == 2


def test_a_buffer_that_a_pass_changes_is_refused():
    facts = model(changed_buffer="blocks.3.norm.running_mean")
    with pytest.raises(
        UserError, match=r"cannot serve blocks\.3\.norm\.running_mean of the model: a forward"
    ):
        planned(machine(), facts, reproducible=True)
    assert planned(machine(), facts).workers.value == 1


class Normed(Tiny):
    """The tiny model with a batch norm before its head."""

    def build_model(self) -> nn.Module:
        built: Any = super().build_model()
        built.head = nn.Sequential(nn.BatchNorm1d(8, dtype=self.dtype), built.head)
        return built


def test_a_batch_norm_is_refused_before_the_run():
    task = Normed(((8, 12),))
    config = Config.of(reproducible=True, gpu_mode="cpu", batch_size=4)
    with pytest.raises(UserError, match=r"head\.0\.num_batches_tracked"):
        Trainer(task=task, config=config, quiet=True).prepare()
