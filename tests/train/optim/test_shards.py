"""Shards of weights are trained as whole weights are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from experts.hosts.group import Group
from harness.hosts.ranks import run_ranks
from harness.runs.host_runs import host_world
from orchestrator.config.settings import Config
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.shards import as_shard, full_tensor, local_part, shard_like
from orchestrator.train.strategies.fsdp import shard_model
from orchestrator.train.strategies.host_mesh import HostMesh

OPTIMIZERS = ("adamw8bit", "muon")
STEPS = 4


def make_model() -> nn.Module:
    """Return layers whose rows 3 workers divide unevenly: one has no row of the last."""
    torch.manual_seed(0)
    layers = (nn.Embedding(11, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 300), nn.Linear(300, 2))
    return nn.Sequential(*layers).double()


def gradients_of(step: int, model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        yield parameter, torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def train(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Train with given gradients. Return the weights, and the state of the optimizer."""
    settings = Config.of(optimizer=name, learning_rate=0.1, weight_decay=0.1).optim
    optimizer = build_named_optimizer(model, settings, fused=False)
    for step in range(STEPS):
        for parameter, gradient in gradients_of(step, model):
            parameter.grad = shard_like(gradient, parameter)
        optimizer.step()
    found = {key: full_tensor(p.detach()).clone() for key, p in model.named_parameters()}
    for key, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            found[f"{slot}/{key}"] = full_tensor(value).clone()
    return found


def train_shards(rank: int, size: int, store: str) -> dict[str, dict[str, Tensor]]:
    with host_world(rank, size, store) as world:
        found = {}
        for name in OPTIMIZERS:
            model = make_model()
            shard_model(model, world, keep_parameters=False, offload=False)
            found[name] = train(model, name)
        return found


def test_shards_are_trained_as_whole_weights() -> None:
    workers = run_ranks(train_shards, 3)
    for name in OPTIMIZERS:
        expected = train(make_model(), name)
        for worker in workers:
            assert worker[name].keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(worker[name][key], tensor), f"{key} of {name}"


def test_an_offloaded_shard_stays_in_host_memory() -> None:
    """Its mesh is of another type of device: here "meta" stands for "cuda"."""
    mesh = HostMesh(Group(0, 2, None), torch.device("meta"))
    shape = torch.Size((4, 3))
    meta = TensorMeta(shape, (3, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    parameter = nn.Parameter(DTensor(torch.ones(2, 3), spec, requires_grad=False))
    parameter.grad = DTensor(torch.ones(2, 3), spec, requires_grad=False)
    assert local_part(as_shard(torch.ones(2, 1), parameter)).device.type == "cpu"
    assert local_part(shard_like(torch.ones(4, 3), parameter)).device.type == "cpu"
    optimizer = AdamW8bit([parameter], 0.1, (0.9, 0.99), 1e-8)
    optimizer.step()
    assert torch.allclose(local_part(parameter.detach()), torch.full((2, 3), 0.9), atol=1e-3)
