"""Placement, load and expert events of a few experts on a few hosts, written by hand."""

from __future__ import annotations

from typing import Any

from orchestrator.record.events.kinds import JsonEvent as Event


def host(rank: int, speed: float | None = 1.0) -> dict[str, Any]:
    return {"rank": rank, "node": "10.0.0.1", "device": "cpu", "name": "EPYC", "speed": speed, "memory": None}


def layer(host_of: list[Any], sizes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"name": "blocks.0.ffn", "host_of": host_of, "sizes": sizes, **fields}


def placement_event(*layers: Any, hosts: Any = None, **fields: Any) -> Event:
    return {
        "event": "placement",
        "step": 0,
        "method": "lpt",
        "hosts": hosts or [host(0), host(1, 2.0)],
        "layers": list(layers),
        **fields,
    }


def load(step: int, *loads: Any, ids: Any = None) -> Event:
    """Return a load event of one step, by layer; ``ids`` names the experts of each."""
    named = {} if ids is None else {"ids": ids}
    return {"event": "load", "step": step, "steps": 1, "loads": list(loads), **named}


def expert_event(step: int, change: str, ids: list[int], **fields: Any) -> Event:
    return {
        "event": "expert",
        "step": step,
        "change": change,
        "layer": 0,
        "layer_name": "blocks.0.ffn",
        "ids": ids,
        "parents": [],
        "hosts": [],
        "reason": "",
        "loss_before": None,
        "loss_after": None,
        "output_change": None,
        "seconds": 0.01,
        "experts": None,
        **fields,
    }


LAYER = layer([0, 1, 1], [10, 20, 30])
"""Three experts on the two hosts of ``placement_event``."""
