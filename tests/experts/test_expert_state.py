"""State by expert: stacked tensors are split into one entry per expert, and joined for any bank."""

from __future__ import annotations

import pytest
import torch

from experts.expert_state import join_experts, remote_expert_names, split_experts, stacked_names
from experts.model import initialise, place
from experts.moe.layer import MoELayer


def make_layer(*sizes: int) -> MoELayer:
    layer = MoELayer(6, sizes, 1)
    initialise(layer, 1)
    return layer


def test_split_state_joins_to_the_same_state() -> None:
    layer = make_layer(4, 9, 4)
    names = stacked_names(layer)
    state = split_experts(dict(layer.state_dict()), names)
    assert {"bank.0.up", "bank.1.down", "bank.2.up", "gate.weight_ED", "load_E"} <= set(state)
    assert "bank.up_4" not in state
    joined = join_experts(state, names)
    assert set(joined) == set(layer.state_dict())
    assert all(torch.equal(joined[name], tensor) for name, tensor in layer.state_dict().items())


def test_the_state_of_hosts_is_the_state_of_one_process() -> None:
    """Each host has the entries of its experts, and names those of the others as remote."""
    whole = make_layer(4, 9, 4)
    expected = split_experts(dict(whole.state_dict()), stacked_names(whole))
    expert_entries = {name for name in expected if name.startswith("bank.")}
    merged: dict[str, torch.Tensor] = {}
    for rank in range(2):
        layer = make_layer(4, 9, 4)
        place(layer, [[1, 1, 0]], rank)
        entries = split_experts(dict(layer.state_dict()), stacked_names(layer))
        assert remote_expert_names(layer) == expert_entries - set(entries)
        merged |= entries
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_a_missing_expert_is_named() -> None:
    layer = make_layer(4, 4)
    names = stacked_names(layer)
    state = split_experts(dict(layer.state_dict()), names)
    del state["bank.1.up"]
    with pytest.raises(KeyError, match=r"bank\.1\.up"):
        join_experts(state, names)
