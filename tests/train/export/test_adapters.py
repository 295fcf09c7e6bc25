"""Adapters that three hosts trained, exported for PEFT and added to the weights of their model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from experts.transformers.files.shards import SINGLE_FILE, fingerprint
from experts.transformers.lora.peft_files import ADAPTER_FILE
from harness.hosts.ranks import run_ranks
from harness.lm.families import FAMILIES, tokens
from harness.lm.family_saves import checkpoint_of, save_families, save_model_folder
from harness.lm.language_models import save_tiny_model
from harness.lm.lora_runs import OPTIONS
from harness.storage.checkpoints import save_checkpoint
from harness.storage.model_files import tensor_names
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import UserError
from orchestrator.train.export.adapters import AdaptedModel, export_adapters, export_merged
from orchestrator.train.export.weights import ExportForm

Folder = Callable[[str], Path]
"""Gives a folder with the model of a family, and a checkpoint of three hosts with uneven numbers of experts.

Both are made when they are first asked for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("adapters")

    @cache
    def made(name: str) -> Path:
        save_model_folder(folder / "models" / name, name)
        run_ranks(save_families, 3, [name], str(folder / "runs"), str(folder / "models"))
        return folder

    return made


def adapters_of(folder: Folder, name: str) -> Path:
    return checkpoint_of(folder(name) / "runs", name)


def adapted_model(folder: Folder, name: str) -> AdaptedModel:
    model = folder(name) / "models" / name
    return AdaptedModel(OPTIONS, str(model), model, model)


def merged(folder: Folder, name: str, target: Path, **options: Any) -> Path:
    settings: dict[str, Any] = {"shard_bytes": 9000, **options}
    form = ExportForm(**settings)
    checkpoint = adapters_of(folder, name)
    export_merged(checkpoint, adapted_model(folder, name), target, form, lambda done, total: None)
    return target


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=tokens(3)).logits


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_model_computes_what_the_adapters_do_beside_theirs(
    name: str, folder: Folder, tmp_path: Path
) -> None:
    import peft

    model = adapted_model(folder, name)
    export_adapters(adapters_of(folder, name), model, tmp_path / "adapters", ExportForm())
    base = logits(loaded(model.folder))
    beside = logits(peft.PeftModel.from_pretrained(loaded(model.folder), tmp_path / "adapters"))
    torch.testing.assert_close(
        logits(loaded(merged(folder, name, tmp_path / "merged"))), beside, rtol=0, atol=1e-5
    )
    assert not torch.allclose(beside, base, rtol=0, atol=1e-3)
    assert tensor_names(tmp_path / "merged") == tensor_names(model.folder)


def test_a_folder_of_adapters_has_the_tokenizer_and_names_its_model(folder: Folder, tmp_path: Path) -> None:
    model = adapted_model(folder, "Qwen3-MoE")
    target = tmp_path / "adapters"
    result = export_adapters(adapters_of(folder, "Qwen3-MoE"), model, target, ExportForm("bf16"))
    names = {path.name for path in target.iterdir()}
    assert names >= {ADAPTER_FILE, "adapter_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert "config.json" not in names
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model.folder)
    tensors = load_file(target / ADAPTER_FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert result.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_merged_model_is_written_in_the_type_that_is_asked_for(folder: Folder, tmp_path: Path) -> None:
    target = merged(folder, "Mixtral", tmp_path / "merged", dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.bfloat16


def test_weights_of_another_model_are_refused(folder: Folder, tmp_path: Path) -> None:
    checkpoint = adapters_of(folder, "Qwen3-MoE")
    other = save_model_folder(tmp_path / "other", "Qwen3-MoE", torch.bfloat16)
    model = AdaptedModel(OPTIONS, "other", other, other)
    with pytest.raises(UserError, match=r"other holds other weights than those that the adapters .* trained"):
        export_merged(checkpoint, model, tmp_path / "merged", ExportForm(), lambda done, total: None)
    assert not (tmp_path / "merged").exists()


def test_adapters_of_random_weights_are_exported_merged_alone(folder: Folder, tmp_path: Path) -> None:
    contents = load(adapters_of(folder, "Qwen3-MoE"))
    store = CheckpointStore(tmp_path / "checkpoints")
    state = {**contents.state, "frozen_base": None}
    checkpoint = save_checkpoint(store, 2, type(contents)(contents.tensors, state))
    model = adapted_model(folder, "Qwen3-MoE")
    with pytest.raises(UserError, match=r"the run of .* began with random weights.*; give --merge"):
        export_adapters(checkpoint, model, tmp_path / "adapters", ExportForm())


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_adapter_on_a_tied_output_is_not_lost_in_silence(
    folder: Folder, tmp_path: Path, is_stored: bool
) -> None:
    base = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    weights = load_file(base / SINGLE_FILE)
    embedding = weights["model.embed_tokens.weight"]
    if is_stored:
        save_file({**weights, "lm_head.weight": embedding.clone()}, base / SINGLE_FILE)
    contents = load(adapters_of(folder, "Qwen3-MoE"))
    adapters = {
        "lm_head.lora_A.default.weight": torch.ones(3, embedding.shape[1]),
        "lm_head.lora_B.default.weight": torch.ones(len(embedding), 3),
    }
    state = {**contents.state, "frozen_base": fingerprint(base)}
    tensors = {**contents.tensors, "model": adapters}
    checkpoint = save_checkpoint(CheckpointStore(tmp_path / "runs"), 2, type(contents)(tensors, state))
    model = AdaptedModel(OPTIONS, str(base), base, base)
    with pytest.raises(UserError, match=r"lm_head.* tied to"):
        export_merged(checkpoint, model, tmp_path / "merged", ExportForm(), lambda done, total: None)
    assert not (tmp_path / "merged").exists()
