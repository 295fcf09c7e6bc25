"""Weights of files with adapters added, tensor by tensor, against a merged model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.transformers.files.model_weights import ModelWeights
from experts.transformers.files.original import Stored
from experts.transformers.files.shards import open_shards
from experts.transformers.lora.adapters import merge_lora
from experts.transformers.lora.merged import FrozenWeights, MergedWeights
from experts.transformers.registration import use
from harness.lm.families import FAMILIES, build
from harness.lm.lora_runs import OPTIONS, LoraTask
from harness.runs.host_runs import by_expert
from harness.storage.model_files import on_meta


class Saved:
    """Tensors of a model as a checkpoint that is read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.stored: Mapping[str, Stored] = {
            name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        }

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        return self._tensors[name] if rows is None else self._tensors[name][slice(*rows)]


def saved_base(folder: Path, name: str) -> Any:
    model = build(name, torch.float32)
    model.config._experts_implementation = None
    model.save_pretrained(folder, max_shard_size="8KB")
    return model.config


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of adapters holds."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return by_expert(model, trained)


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_tensor_is_that_of_the_merged_model(name: str, tmp_path: Path) -> None:
    config = saved_base(tmp_path, name)
    model = LoraTask(name).build_model().float()
    adapters = Saved(adapters_of(model))
    merge_lora(model)
    expected = by_expert(model, {**dict(model.named_parameters()), **persistent_buffers(model)})
    with open_shards(tmp_path) as shards:
        merged = MergedWeights(ModelWeights(use(on_meta(config)), shards), adapters, OPTIONS.scale)
        assert merged.stored.keys() == expected.keys()
        for key, stored in merged.stored.items():
            tensor = merged.read(key)
            assert tuple(tensor.shape) == stored.shape, key
            torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-7)
            middle = len(tensor) // 2
            part = merged.read(key, (middle, len(tensor)))
            torch.testing.assert_close(part, tensor[middle:], rtol=1e-6, atol=1e-7)


def test_weights_of_the_checkpoint_itself_are_merged() -> None:
    model = LoraTask("Qwen3-MoE").build_model().float()
    saved = Saved(by_expert(model, dict(model.named_parameters())))
    merge_lora(model)
    expected = by_expert(model, dict(model.named_parameters()))
    merged = MergedWeights(FrozenWeights(saved), saved, OPTIONS.scale)
    assert merged.stored.keys() == expected.keys()
    for key in merged.stored:
        torch.testing.assert_close(merged.read(key), expected[key], rtol=1e-6, atol=1e-7)


def test_a_buffer_of_the_checkpoint_is_the_one_that_was_trained(tmp_path: Path) -> None:
    config = saved_base(tmp_path, "DeepSeek-V3")
    model = LoraTask("DeepSeek-V3").build_model().float()
    (bias,) = [name for name in persistent_buffers(model) if name.endswith("e_score_correction_bias")][:1]
    trained = torch.full_like(model.get_buffer(bias), 3.0)
    saved = Saved({**adapters_of(model), bias: trained})
    with open_shards(tmp_path) as shards:
        merged = MergedWeights(ModelWeights(use(on_meta(config)), shards), saved, OPTIONS.scale)
        assert torch.equal(merged.read(bias), trained)


def test_an_adapter_without_its_weight_is_refused(tmp_path: Path) -> None:
    config = saved_base(tmp_path, "Qwen3-MoE")
    saved = Saved({"model.layers.9.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 2)})
    with open_shards(tmp_path) as shards:
        weights = ModelWeights(use(on_meta(config)), shards)
        with pytest.raises(
            ValueError, match=r"the adapter model.layers.9.* they are of another model, or of an output"
        ):
            MergedWeights(weights, saved, 1.0)


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    names = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in names and not name.endswith(".load_E")
    }
