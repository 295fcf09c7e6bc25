"""The survey of a cluster, with nodes as Ray describes them: the memory is that of the training nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import NodeDiedError

from harness.fakes.inventories import gpu, machine
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.runtime.cluster import survey as module
from orchestrator.types import GIB

DRIVER = machine(ram_free=500 * GIB)


def node(name: str, store: int, memory: int | None = None, **slots: int) -> dict[str, Any]:
    """A node as ``ray.nodes()`` describes it."""
    resources = {kind.upper(): float(count) for kind, count in slots.items()}
    resources["object_store_memory"] = float(store * GIB)
    if memory is not None:
        resources["memory"] = float(memory * GIB)
    return {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": resources}


def survey(
    monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any], asked: dict[str, Inventory] | None = None
) -> Any:
    context = SimpleNamespace(get_node_id=lambda: "driver")
    ray = SimpleNamespace(nodes=lambda: list(nodes), get_runtime_context=lambda: context)
    monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(module, "autoscaler_limits", dict)
    known = asked or {}
    monkeypatch.setattr(
        module, "ask_nodes", lambda nodes, _: [(n, known[n["NodeID"]]) for n in nodes if n["NodeID"] in known]
    )
    return module.survey(DRIVER, joined=True)


def test_a_driver_without_slots_says_nothing_about_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (node("driver", 9, cpu=0), node("a", 30, 70, cpu=8), node("b", 40, 90, cpu=8))
    cluster, weakest = survey(monkeypatch, *nodes)
    assert cluster.object_store == 30 * GIB
    assert weakest.ram_free == 100 * GIB, "what Ray leaves to workers on node a, and its object store"


def test_where_there_are_gpus_their_nodes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least memory may be on another node than the smallest GPU."""
    asked = {
        "a": machine(gpu(total=80 * GIB), ram_free=64 * GIB),
        "b": machine(gpu(total=40 * GIB), ram_free=900 * GIB),
    }
    nodes = (node("driver", 9, cpu=8), node("a", 30, cpu=8, gpu=1), node("b", 40, cpu=8, gpu=1))
    cluster, weakest = survey(monkeypatch, *nodes, asked=asked)
    assert cluster.object_store == 30 * GIB
    assert weakest.gpus == asked["b"].gpus
    assert weakest.ram_free == 64 * GIB


def test_this_machine_alone_is_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weakest = survey(monkeypatch, node("driver", 9, 20, cpu=8))
    assert weakest == DRIVER


def test_a_node_that_is_lost_while_it_is_asked_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(call: str) -> bool:
        if call == "lost":
            raise NodeDiedError("the node was lost")
        return True

    task = SimpleNamespace(options=lambda scheduling_strategy: task, remote=lambda argument: next(calls))
    calls = iter(["good", "lost", "good too"])
    fake_ray = SimpleNamespace(
        remote=lambda **_: lambda function: task,
        wait=lambda calls, num_returns, timeout: (calls, []),
        get=get,
    )
    monkeypatch.setattr(module, "ray", fake_ray)
    nodes = [{"NodeID": f"{number:056x}"} for number in range(3)]
    assert module.ask_nodes(nodes, len, "path") == [(nodes[0], True), (nodes[2], True)]
