"""Folders of models as ``save_pretrained`` writes them, and models that hosts build without memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.model import place
from experts.transformers.files.places import ExpertsPlace, places_of
from experts.transformers.registration import use

HOSTS = (0, 1, 2)


def uneven(num_experts: int, layer: int) -> list[int]:
    """Return the host of each expert: uneven, another way in each layer, host 2 without any in the second."""
    if layer % 2 == 1:
        return [expert % 2 for expert in range(num_experts)]
    return [(expert * expert + 1) % 3 for expert in range(num_experts)]


def on_meta(config: Any) -> Any:
    """Return the model of a config without memory."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)


def built_on_host(config: Any, rank: int | None) -> nn.Module:
    """Return the model of a host as it is before its weights: with memory that holds garbage.

    Without a rank it is whole, in one process."""
    model = use(on_meta(config))
    if rank is not None:
        hosts = [uneven(len(layer.load_E), i) for i, (_, layer) in enumerate(moe_layers(model))]
        place(model, hosts, rank)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77)
    return model


def assert_holds(model: nn.Module, expected: nn.Module) -> None:
    """Assert that a host's model has the weights and buffers of a whole model, to the bit."""
    whole = dict(expected.state_dict(keep_vars=True))
    places = places_of(model)
    assert places.keys() == whole.keys()
    for name, found in places.items():
        theirs = whole[name].detach()
        if isinstance(found, ExpertsPlace):
            for row, tensor in found.held.items():
                assert isinstance(tensor, Tensor)
                assert torch.equal(tensor, theirs[row : row + 1]), f"{name} {row}"
        else:
            assert torch.equal(found.memory, theirs), name
    computed = computed_buffers(expected)
    for name, buffer in computed_buffers(model).items():
        assert torch.equal(buffer, computed[name]), name


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of ``transformers`` that no file holds."""
    held = model.state_dict().keys()
    return {
        name: buffer for name, buffer in model.named_buffers() if name not in held and ".hosted" not in name
    }


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's tensors that files hold, tied ones once."""
    unique = {
        (tensor.data_ptr(), tensor.shape): tensor.nbytes
        for found in places_of(model).values()
        for tensor in (found.held.values() if isinstance(found, ExpertsPlace) else [found.memory])
        if isinstance(tensor, Tensor)
    }
    return sum(unique.values())


def header_bytes(folder: Path) -> int:
    """Return the bytes of the headers of all files in a folder."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += 8 + int.from_bytes(file.read(8), "little")
    return total


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in all files of a folder."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names |= header.keys() - {"__metadata__"}
    return names
