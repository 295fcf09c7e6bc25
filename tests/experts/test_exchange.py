"""The layer on several hosts, real processes over gloo, against the same layer in one process: outputs, losses and every
gradient in fp64, with hosts that hold no expert, hosts that have no token, and parts that are empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.context import MoEContext, StepContext
from experts.exchange import GroupExchange
from experts.layer import MoELayer
from experts.model import attach, initialise, place
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import process_group_world
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    top_k: int
    host_of: tuple[int, ...]
    tokens: tuple[int, ...]
    """Of each host."""
    chunks: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    silent: tuple[int, ...] = ()

    @property
    def hosts(self) -> int:
        return len(self.tokens)


WIDTH = 6
CASES = {
    "even": Case((4, 4), 1, (0, 1), (5, 5)),
    "uneven": Case((3, 9, 3, 5, 9, 2, 4), 2, (0, 1, 1, 2, 1, 0, 1), (7, 2, 11)),
    "host without experts": Case((4, 4, 5), 2, (2, 2, 2), (3, 4, 5)),
    "host without tokens": Case((4, 4, 5), 2, (0, 1, 2), (6, 0, 5)),
    "in parts": Case((3, 9, 3, 5), 3, (0, 1, 0, 1), (9, 4), chunks=3),
    "parts without tokens": Case((3, 9, 3, 5), 2, (0, 1, 0, 1), (9, 1), chunks=4),
    "all to all": Case((4,) * 9, 9, (0, 1, 2, 0, 1, 2, 0, 1, 2), (3, 3, 3)),
    "ffn, sigmoid, not normalised": Case(
        (4, 6, 4),
        2,
        (1, 0, 1),
        (5, 8),
        options=(("kind", "ffn"), ("scores", "sigmoid"), ("normalise", False)),
    ),
    "shared expert": Case((4, 6, 4), 2, (1, 0, 1), (5, 8), chunks=2, options=(("shared", 5),)),
    "capacity": Case((4, 6, 4, 4), 2, (1, 0, 1, 2), (5, 8, 6), options=(("capacity", 0.6),)),
    "jitter": Case((4, 6, 4, 4), 2, (1, 0, 1, 2), (5, 8, 6), options=(("jitter", 0.3),)),
    "silent host": Case((4, 6, 4, 4), 2, (1, 0, 1, 2), (5, 8, 6), options=(("capacity", 0.7),), silent=(1,)),
    "four hosts": Case(tuple(range(2, 15)), 4, (3, 1, 0, 0, 2, 2, 3, 1, 1, 1, 0, 3, 3), (2, 9, 4, 1)),
}


def make(case: Case) -> MoELayer:
    layer = MoELayer(WIDTH, case.sizes, case.top_k, **dict(case.options)).double()
    initialise(layer, 3)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(40)  # decided gates: no ties, and uneven loads
        layer.load_E.copy_(torch.arange(1, len(case.sizes) + 1))
    return layer


def tokens_of(case: Case) -> Tensor:
    return torch.randn(
        sum(case.tokens), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def passed(layer: MoELayer, case: Case, places_T: Tensor) -> dict[str, Tensor]:
    """Output, counts and gradients of one pass over the tokens of these places."""
    x_TD = tokens_of(case)[places_T].requires_grad_()
    y_TD, routing = layer(x_TD)
    upstream_TD = torch.sin(places_T.double()).unsqueeze(1) * torch.linspace(
        -1, 1, WIDTH, dtype=torch.float64
    )
    ((y_TD * upstream_TD).sum() + 0.3 * routing.balance + 0.1 * routing.z).backward()
    assert x_TD.grad is not None
    found = {"y": y_TD.detach(), "x": x_TD.grad, "counts": routing.counts_E}
    for group, role, stack in layer.bank.stacks():
        assert stack.grad is not None
        found |= {f"{expert}.{role}": stack.grad[slot] for slot, expert in enumerate(group.ids)}
    dense = [layer.gate.weight_ED, *(layer.shared.parameters() if layer.shared else ())]
    return found | {f"dense.{number}": p.grad for number, p in enumerate(dense) if p.grad is not None}


def on_host(rank: int, size: int, store: str, case: Case) -> dict[str, Tensor]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        assert world.group is not None
        layer = make(case)
        first_token = sum(case.tokens[r] for r in range(rank) if r not in case.silent)
        step = StepContext(first_sample=first_token, dummy=rank in case.silent)
        attach(layer, MoEContext(GroupExchange(world.group), chunks=case.chunks, step=step))
        place(layer, [case.host_of], rank)
        return passed(layer, case, places(case)[rank])


def places(case: Case) -> list[Tensor]:
    """The places of each host's tokens among all of them."""
    return list(torch.arange(sum(case.tokens)).split(list(case.tokens)))


@pytest.mark.parametrize("name", CASES)
def test_hosts_equal_one_process(name: str) -> None:
    case = CASES[name]
    heard = [host for host in range(case.hosts) if host not in case.silent]
    layer = make(case)
    attach(layer, MoEContext())
    alone = passed(layer, case, torch.cat([places(case)[host] for host in heard]))
    found = run_ranks(on_host, case.hosts, case)
    for key in ("y", "x"):
        torch.testing.assert_close(
            torch.cat([found[host][key] for host in heard]), alone[key], rtol=1e-11, atol=1e-12
        )
    assert torch.stack([found[host]["counts"] for host in heard]).sum(0).tolist() == alone["counts"].tolist()
    experts = {key: value for answer in found for key, value in answer.items() if key[0].isdigit()}
    assert experts.keys() == {key for key in alone if key[0].isdigit()}
    for key, value in experts.items():
        torch.testing.assert_close(value, alone[key], rtol=1e-11, atol=1e-12)
    for key in [key for key in alone if key.startswith("dense")]:
        torch.testing.assert_close(
            torch.stack([found[host][key] for host in heard]).sum(0), alone[key], rtol=1e-11, atol=1e-12
        )
