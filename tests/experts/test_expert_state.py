from __future__ import annotations

import pytest
import torch

from experts.expert_state import join_experts, split_experts, stacked_names
from experts.layer import MoELayer
from experts.model import initialise


def test_state_by_expert_moves_between_banks() -> None:
    layer = MoELayer(6, [4, 9, 4], 2)
    initialise(layer, 1)
    names = stacked_names(layer)
    state = split_experts(dict(layer.state_dict()), names)
    assert {"bank.0.up", "bank.1.down", "bank.2.up", "gate.weight_ED", "load_E"} <= set(state)
    assert "bank.up_4" not in state
    joined = join_experts(state, names)
    assert set(joined) == set(layer.state_dict())
    assert all(torch.equal(joined[name], tensor) for name, tensor in layer.state_dict().items())


def test_missing_expert_is_named() -> None:
    layer = MoELayer(6, [4, 4], 1)
    names = stacked_names(layer)
    state = split_experts(dict(layer.state_dict()), names)
    del state["bank.1.up"]
    with pytest.raises(KeyError, match=r"bank\.1\.up"):
        join_experts(state, names)
