"""The task lm on hosts with GPUs, over gloo and NCCL: whole, with adapters, and with a sharded dense part."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.hosts.gpu_ranks import rank_device, skip_without
from harness.hosts.ranks import run_ranks
from harness.lm.families import COMMON
from harness.lm.language_models import FilledLanguageModel, lm_config
from harness.lm.lm_runs import GLOBAL_BATCH, PLACEMENTS, STEPS
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.estimate import ShardingForm
from orchestrator.tasks.lm.output_layer import call_with_labels
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.tasks.token_loss import NO_LABEL
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.types import PrecisionName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPU = torch.device("cuda:0")
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "whole": ({}, "none"),
    "auxiliary loss": ({"balance_loss": 0.1}, "none"),
    "lora": ({"lora": 4}, "none"),
    "zero2": ({}, "zero2"),
    "zero3": ({}, "zero3"),
    "lora with zero3": ({"lora": 4}, "zero3"),
}
"""Settings of the task, and the sharding of the dense part."""


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    skip_without(request.param, 2)
    return request.param


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"))


@pytest.fixture(autouse=True)
def _free_memory() -> None:
    """Return memory that earlier tests of this process have cached; the ranks need it."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, 4])
def test_a_plan_traces_the_model_on_a_gpu_without_building_it(
    config: Config, lora: int | None, precision: PrecisionName
) -> None:
    """Otherwise large models are refused, and small ones run on the CPU."""
    facts = model_facts(LanguageModel(config.but(lora=lora)), "cuda:0", precision)
    assert facts.method == f"traced for cuda in {precision}"


def large_vocabulary_gradients(chunked: bool, precision: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of a pass over samples of 6.4 million logits, of which some have no label."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {**COMMON, "vocab_size": 50_257, "head_dim": 16}
    config = LlamaConfig(**sizes)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(GPU)
    ids_BS = torch.randint(50_257, (4, 128), generator=torch.Generator().manual_seed(1)).to(GPU)
    labels_BS = ids_BS.roll(-1, 1)
    labels_BS[:, ::3] = NO_LABEL
    inputs = {"input_ids": ids_BS, "use_cache": False}
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
        if chunked:
            outputs = call_with_labels(model, labels_BS, inputs, pytest.fail)
            assert outputs.logits.numel() == 0, "no whole logits"
            loss = outputs.loss
        else:
            logits = model(**inputs).logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels_BS.flatten(), reduction="sum")
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the error of all gradients together."""
    differences = [found[name] - gradient for name, gradient in expected.items()]
    return norm_of(differences) / norm_of(expected.values())


def norm_of(tensors: Iterable[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def test_the_loss_of_a_large_vocabulary_has_the_gradients_of_whole_logits() -> None:
    """In bf16 their error is no larger than that of whole logits, within a tenth."""
    expected = large_vocabulary_gradients(False, torch.float32)
    found = large_vocabulary_gradients(True, torch.float32)
    assert found.keys() == expected.keys()
    for name in expected:
        assert relative_error({name: found[name]}, {name: expected[name]}) < 1e-5, name
    error = relative_error(large_vocabulary_gradients(True, torch.bfloat16), expected)
    of_whole_logits = relative_error(large_vocabulary_gradients(False, torch.bfloat16), expected)
    assert error < 1.1 * of_whole_logits < 0.05


def lm_losses(config: Config, world: World, sharding: ShardingForm) -> list[float]:
    stepper, feed = make_stepper(
        FilledLanguageModel(config),
        2,
        GLOBAL_BATCH,
        world=world,
        sharding=sharding,
        host_of=PLACEMENTS.get(world.size),
        recompute=sharding == "none",
    )
    return [mean_loss(totals) for totals in run_steps(stepper, feed, STEPS)]


def lm_losses_on_host(
    rank: int, size: int, store: str, backend: str, config: Config, sharding: ShardingForm
) -> list[float]:
    device = rank_device(rank, size)
    with process_group_world(file_store(store, size), rank, size, device, backend, 120) as world:
        return lm_losses(config, world, sharding)


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_hosts_on_gpus_train_a_language_model_as_one_process_does(
    config: Config, backend: str, kind: str, hosts: int
) -> None:
    skip_without(backend, hosts)
    settings, sharding = KINDS[kind]
    chosen = config.but(**settings)
    expected = lm_losses(chosen, World.single_process(GPU), "none")
    assert expected[-1] < expected[0]
    for losses in run_ranks(lm_losses_on_host, hosts, backend, chosen, sharding, timeout=240.0):
        assert losses == pytest.approx(expected, rel=1e-4)
