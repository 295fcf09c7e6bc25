"""The choices of the plan reach torch in each worker, and torch is as before after the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.fakes.inventories import gpu, machine, planned
from orchestrator.config.settings import Config
from orchestrator.train.worker import torch_settings as module
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.types import Choice


def state_of_torch() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "products": torch.get_float32_matmul_precision(),
        "tf32": cudnn.allow_tf32,
        "benchmark": cudnn.benchmark,
        "deterministic": (cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
    }


@pytest.mark.parametrize("repeats", [False, True])
def test_choices_of_the_plan_reach_torch_and_end_with_the_run(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    fractions: list[float] = []
    monkeypatch.setattr(module, "limit_memory", lambda _, fraction: fractions.append(fraction))
    config = Config.of(deterministic=repeats, gpu_memory_fraction=0.5)
    plan = replace(planned(machine(gpu()), deterministic=repeats), threads=Choice(2, "here"))
    before = state_of_torch()
    with torch_settings(config, plan, torch.device("cpu")):
        assert state_of_torch() == {
            "threads": 2,
            "products": "highest" if repeats else "high",
            "tf32": not repeats,
            "benchmark": not repeats,
            "deterministic": (repeats, repeats),
        }
    assert state_of_torch() == before
    assert fractions == [0.5, 1.0]


def test_a_run_that_repeats_compiles_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past torch's limit a shape would be computed by other kernels, on the workers that see it last."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    config = Config.of(reproducible=True, compile="on")
    plan = replace(planned(machine(gpu()), reproducible=True), compile=Choice(True, "here"))
    graphs: list[int] = []

    def counting(graph: Any, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend=counting, dynamic=False)
    with torch_settings(config, plan, torch.device("cpu")):
        for rows in range(2, 14):
            compiled(torch.ones(rows))
    assert len(graphs) == 12
    torch._dynamo.reset()
