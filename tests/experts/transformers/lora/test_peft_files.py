"""Files that plain ``transformers`` and PEFT read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.transformers.lora.adapters import LoraOptions, merge_lora
from experts.transformers.lora.peft_files import save_lora
from experts.transformers.registration import restore, use
from harness.lm.families import FAMILIES, build, tokens
from harness.lm.lora_runs import OPTIONS, LoraTask

TARGETS = ((), ("experts",), ("attention",), ("experts.down_proj", "q_proj"), ("mlp.experts.gate_up_proj",))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(3)).logits


def loaded(folder: Path, name: str) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(build(name, torch.float32), folder)


def check(name: str, options: LoraOptions, folder: Path) -> None:
    model = LoraTask(name, options=options).build_model().float()
    save_lora(model, folder, options)
    assert not torch.allclose(logits(model), logits(build(name, torch.float32)), atol=1e-3)
    torch.testing.assert_close(logits(loaded(folder, name)), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_the_adapters_of_a_family(name: str, tmp_path: Path) -> None:
    check(name, OPTIONS, tmp_path)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_peft_loads_adapters_on_chosen_targets(targets: tuple[str, ...], tmp_path: Path) -> None:
    check("Qwen3-MoE", LoraOptions(2, 3.0, targets), tmp_path)


def test_the_config_names_base_rank_and_targets(tmp_path: Path) -> None:
    model = LoraTask("Qwen3-MoE").build_model()
    save_lora(model, tmp_path, OPTIONS, base="Qwen/Qwen3-30B-A3B")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-30B-A3B"
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 5.0, "LORA")
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert sorted(config["target_parameters"]) == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-OSS", "Granite-MoE"])
def test_a_merged_model_equals_base_and_adapters(name: str, tmp_path: Path) -> None:
    model = LoraTask(name).build_model().float()
    save_lora(model, tmp_path, OPTIONS)
    merged: Any = restore(merge_lora(model))
    torch.testing.assert_close(logits(merged), logits(loaded(tmp_path, name)), rtol=1e-5, atol=1e-5)


def test_a_model_without_adapters_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no adapters to write"):
        save_lora(use(build("Qwen3-MoE")), tmp_path, OPTIONS)
