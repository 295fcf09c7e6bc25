"""The layer on several hosts, in real processes over gloo, against the same layer in one process.

Outputs, losses and every gradient are compared in fp64: with hosts without experts, hosts without
tokens, and empty chunks. T counts tokens, D is their width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from experts.hosts.group import Group
from experts.model import attach, initialise, place
from experts.moe.context import MoEContext, StepContext
from experts.moe.layer import MoELayer
from experts.tokens.bounds import ExchangeBounds, RowBound
from experts.tokens.exchange import GroupExchange
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

WIDTH = 6


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    top_k: int
    host_of: tuple[int, ...]
    tokens: tuple[int, ...]
    """Tokens of each host."""
    num_chunks: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    dummy_hosts: tuple[int, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(self.tokens)

    @property
    def data_hosts(self) -> list[int]:
        """Hosts whose tokens count."""
        return [host for host in range(self.num_hosts) if host not in self.dummy_hosts]


CASES = {
    "even": Case(
        sizes=(4, 4),
        top_k=1,
        host_of=(0, 1),
        tokens=(5, 5),
    ),
    "uneven": Case(
        sizes=(3, 9, 3, 5, 9, 2, 4),
        top_k=2,
        host_of=(0, 1, 1, 2, 1, 0, 1),
        tokens=(7, 2, 11),
    ),
    "host without experts": Case(
        sizes=(4, 4, 5),
        top_k=2,
        host_of=(2, 2, 2),
        tokens=(3, 4, 5),
    ),
    "host without tokens": Case(
        sizes=(4, 4, 5),
        top_k=2,
        host_of=(0, 1, 2),
        tokens=(6, 0, 5),
    ),
    "chunks": Case(
        sizes=(3, 9, 3, 5),
        top_k=3,
        host_of=(0, 1, 0, 1),
        tokens=(9, 4),
        num_chunks=3,
    ),
    "empty chunks": Case(
        sizes=(3, 9, 3, 5),
        top_k=2,
        host_of=(0, 1, 0, 1),
        tokens=(9, 1),
        num_chunks=4,
    ),
    "every token to every expert": Case(
        sizes=(4,) * 9,
        top_k=9,
        host_of=(0, 1, 2, 0, 1, 2, 0, 1, 2),
        tokens=(3, 3, 3),
    ),
    "ffn, sigmoid, not normalised": Case(
        sizes=(4, 6, 4),
        top_k=2,
        host_of=(1, 0, 1),
        tokens=(5, 8),
        options=(("kind", "ffn"), ("scores", "sigmoid"), ("normalise", False)),
    ),
    "shared expert": Case(
        sizes=(4, 6, 4),
        top_k=2,
        host_of=(1, 0, 1),
        tokens=(5, 8),
        num_chunks=2,
        options=(("shared", 5),),
    ),
    "capacity": Case(
        sizes=(4, 6, 4, 4),
        top_k=2,
        host_of=(1, 0, 1, 2),
        tokens=(5, 8, 6),
        options=(("capacity", 0.6),),
    ),
    "jitter": Case(
        sizes=(4, 6, 4, 4),
        top_k=2,
        host_of=(1, 0, 1, 2),
        tokens=(5, 8, 6),
        options=(("jitter", 0.3),),
    ),
    "dummy host": Case(
        sizes=(4, 6, 4, 4),
        top_k=2,
        host_of=(1, 0, 1, 2),
        tokens=(5, 8, 6),
        options=(("capacity", 0.7),),
        dummy_hosts=(1,),
    ),
    "four hosts": Case(
        sizes=tuple(range(2, 15)),
        top_k=4,
        host_of=(3, 1, 0, 0, 2, 2, 3, 1, 1, 1, 0, 3, 3),
        tokens=(2, 9, 4, 1),
    ),
}


def make_layer(case: Case) -> MoELayer:
    layer = MoELayer(WIDTH, case.sizes, case.top_k, **dict(case.options)).double()
    initialise(layer, 3)
    with torch.no_grad():
        layer.gate.weight_ED.mul_(40)  # decided gates: no ties, and uneven loads
        layer.load_E.copy_(torch.arange(1, len(case.sizes) + 1))
    return layer


def make_tokens(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(case.tokens), WIDTH, dtype=torch.float64, generator=generator)


def positions(case: Case) -> list[Tensor]:
    """The positions of each host's tokens among the tokens of all hosts."""
    return list(torch.arange(sum(case.tokens)).split(list(case.tokens)))


def run_pass(layer: MoELayer, case: Case, position_T: Tensor) -> dict[str, Tensor]:
    """Output, counts and gradients of one pass over the tokens at these positions."""
    x_TD = make_tokens(case)[position_T].requires_grad_()
    y_TD, routing = layer(x_TD)
    column_D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    upstream_TD = torch.sin(position_T.double()).unsqueeze(1) * column_D
    ((y_TD * upstream_TD).sum() + 0.3 * routing.balance + 0.1 * routing.z).backward()
    assert x_TD.grad is not None
    result = {"y": y_TD.detach(), "x": x_TD.grad, "counts": routing.counts_E}
    for group, role, stack in layer.bank.stacks():
        assert stack.grad is not None
        for index, expert in enumerate(group.rows):
            result[f"{expert}.{role}"] = stack.grad[index]
    dense = [layer.gate.weight_ED, *(layer.shared.parameters() if layer.shared else ())]
    for number, parameter in enumerate(dense):
        if parameter.grad is not None:
            result[f"dense.{number}"] = parameter.grad
    return result


Rows = Literal["counted", "bounded", "beyond the bound"]


def run_host(rank: int, size: int, store: str, case: Case, rows: Rows) -> dict[str, Tensor]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        assert world.group is not None
        layer = make_layer(case)
        first_token = sum(case.tokens[host] for host in case.data_hosts if host < rank)
        step = StepContext(first_sample=first_token, dummy=rank in case.dummy_hosts)
        context = MoEContext(GroupExchange(world.group), case.num_chunks, step)
        attach(layer, context)
        place(layer, [case.host_of], rank)
        if rows == "counted":
            return run_pass(layer, case, positions(case)[rank])
        return run_bounded(layer, case, rows, context, world.group)


def run_bounded(
    layer: MoELayer, case: Case, rows: Rows, context: MoEContext, group: Group
) -> dict[str, Tensor]:
    """Run a pass by counts, which sets the bounds, and another one by bounds."""
    bounds = ExchangeBounds(torch.device("cpu"))
    context.bounds = bounds
    position_T = positions(case)[group.rank]

    def attempt() -> tuple[dict[str, Tensor], bool]:
        layer.zero_grad(set_to_none=True)
        bounds.begin_attempt()
        return run_pass(layer, case, position_T), bounds.end_attempt(group)

    _, fits = attempt()
    assert fits
    assert not bounds._bounded
    assert len(bounds._counted) == case.num_chunks
    if rows == "beyond the bound":
        bounds._of_layer = dict.fromkeys(bounds._of_layer, RowBound(rows=0, expert_rows=0))
        assert not attempt()[1]
        assert len(bounds._bounded) == case.num_chunks
    result, fits = attempt()
    assert fits
    repeats = rows == "beyond the bound"
    assert len(bounds._counted) == case.num_chunks * repeats
    assert len(bounds._bounded) == case.num_chunks * (not repeats)
    return result


@pytest.mark.extended(but_first=8)
@pytest.mark.parametrize("rows", get_args(Rows))
@pytest.mark.parametrize("name", CASES)
def test_hosts_equal_one_process(name: str, rows: Rows) -> None:
    case = CASES[name]
    layer = make_layer(case)
    attach(layer, MoEContext())
    expected = run_pass(layer, case, torch.cat([positions(case)[host] for host in case.data_hosts]))
    hosts = run_ranks(run_host, case.num_hosts, case, rows)
    data_hosts = [hosts[host] for host in case.data_hosts]
    for key in ("y", "x"):
        joined = torch.cat([host[key] for host in data_hosts])
        torch.testing.assert_close(joined, expected[key], rtol=1e-11, atol=1e-12)
    counts_E = torch.stack([host["counts"] for host in data_hosts]).sum(0)
    assert counts_E.tolist() == expected["counts"].tolist()
    experts = {key: value for host in hosts for key, value in host.items() if key[0].isdigit()}
    assert experts.keys() == {key for key in expected if key[0].isdigit()}
    for key, gradient in experts.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-11, atol=1e-12)
    for key in [key for key in expected if key.startswith("dense")]:
        gradient = torch.stack([host[key] for host in data_hosts]).sum(0)
        torch.testing.assert_close(gradient, expected[key], rtol=1e-11, atol=1e-12)
