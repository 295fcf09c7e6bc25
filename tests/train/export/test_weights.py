"""Checkpoints of one process and of three hosts, exported as folders that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from experts.transformers.files import writing
from harness.hosts.ranks import run_ranks
from harness.lm.families import BIASED_FAMILIES, FAMILIES, build, in_their_names, tokens
from harness.lm.family_saves import (
    BIAS_RATE,
    balanced_task,
    checkpoint_of,
    save_families,
    save_model_folder,
    save_trained,
)
from harness.moe.bias_runs import biases_of
from harness.storage.checkpoints import save_checkpoint
from harness.storage.model_files import tensor_names
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.checkpoint.weight_source import CheckpointWeights
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.train.export import folder as export_folder
from orchestrator.train.export.weights import ExportForm, export_checkpoint
from orchestrator.train.group.world import World

Trained = Callable[[str], Path]
"""Gives the checkpoint of a family, which is trained when it is first asked for."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("one")

    @cache
    def trained(name: str) -> Path:
        save_trained(balanced_task(name), World.single_process(), folder / name)
        return checkpoint_of(folder, name)

    return trained


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("three")

    @cache
    def trained(name: str) -> Path:
        run_ranks(save_families, 3, [name], str(folder))
        return checkpoint_of(folder, name)

    return trained


def exported(checkpoint: Path, folder: Path, name: str, **options: Any) -> Path:
    source = save_model_folder(folder / "source", name)
    target = folder / "exported"
    settings: dict[str, Any] = {"shard_bytes": 9000, **options}
    chosen = ExportForm(**settings)
    export_checkpoint(checkpoint, source, target, chosen, lambda done, total: None)
    return target


def trained_weights(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """Return the weights in a checkpoint by the names of ``transformers``."""
    eager = build(name)
    return in_their_names(load(checkpoint).tensors["model"], list(eager.state_dict()), eager)


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_the_trained_weights(
    name: str, hosts: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trained: Trained = request.getfixturevalue("one_process" if hosts == 1 else "three_hosts")
    checkpoint = trained(name)
    target = exported(checkpoint, tmp_path, name)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager")
    state = loaded.state_dict()
    expected = trained_weights(checkpoint, name)
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor.to(state[key].dtype)), key
    assert not all(torch.equal(tensor, build(name).state_dict()[key]) for key, tensor in expected.items())
    assert tensor_names(target) == tensor_names(tmp_path / "source")
    assert len(list(target.glob("*.safetensors"))) > 2


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", BIASED_FAMILIES)
def test_an_export_has_the_routing_biases_that_balanced_the_experts(
    name: str, three_hosts: Trained, tmp_path: Path
) -> None:
    target = exported(three_hosts(name), tmp_path, name)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).state_dict()
    initial = biases_of(build(name))
    moves = torch.stack([(loaded[key].double() - bias_E) / BIAS_RATE for key, bias_E in initial.items()])
    assert torch.allclose(moves, moves.round(), atol=1e-4)
    assert float(moves.abs().max().round()) == 2


def test_the_logits_are_those_of_the_trained_model(one_process: Trained, tmp_path: Path) -> None:
    checkpoint = one_process("Qwen3-MoE")
    target = exported(checkpoint, tmp_path, "Qwen3-MoE")
    load_eager = partial(
        AutoModelForCausalLM.from_pretrained, dtype=torch.float64, experts_implementation="eager"
    )
    trained = load_eager(tmp_path / "source")
    trained.load_state_dict(trained_weights(checkpoint, "Qwen3-MoE"))
    ids = tokens(3)
    assert torch.equal(load_eager(target)(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_the_folder_has_the_small_files_of_the_model(one_process: Trained, tmp_path: Path) -> None:
    target = exported(one_process("Mixtral"), tmp_path, "Mixtral", dtype="bf16")
    names = {path.name for path in target.iterdir() if path.suffix == ".json"}
    expected = ["config", "generation_config", "model.safetensors.index", "tokenizer", "tokenizer_config"]
    assert names == {f"{name}.json" for name in expected}
    assert (target / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensor_names(target)


def test_a_small_model_is_one_file_without_an_index(one_process: Trained, tmp_path: Path) -> None:
    target = exported(one_process("Mixtral"), tmp_path, "Mixtral", shard_bytes=10**9)
    assert [path.name for path in target.glob("model*")] == ["model.safetensors"]
    AutoModelForCausalLM.from_pretrained(target)


def test_the_type_is_that_of_the_config_unless_one_is_asked_for(one_process: Trained, tmp_path: Path) -> None:
    checkpoint = one_process("DeepSeek-V3")
    source = save_model_folder(tmp_path / "source", "DeepSeek-V3", torch.bfloat16)
    for asked, expected in ((None, torch.bfloat16), ("fp32", torch.float32)):
        target = tmp_path / f"as {asked}"
        export_checkpoint(checkpoint, source, target, ExportForm(asked), lambda done, total: None)
        loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        assert loaded.model.embed_tokens.weight.dtype == expected
        embedding = trained_weights(checkpoint, "DeepSeek-V3")["model.embed_tokens.weight"]
        assert torch.equal(loaded.model.embed_tokens.weight, embedding.to(expected))


def test_large_tensors_are_copied_in_pieces(
    one_process: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PIECE_BYTES", 100)
    checkpoint = one_process("GPT-OSS")
    target = exported(checkpoint, tmp_path, "GPT-OSS", dtype="fp32")
    state = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    for key, tensor in trained_weights(checkpoint, "GPT-OSS").items():
        assert torch.equal(state[key], tensor.to(state[key].dtype)), key


def test_the_average_of_the_weights_is_exported_on_request(one_process: Trained, tmp_path: Path) -> None:
    name = "Qwen3-MoE"
    contents = load(one_process(name))
    averages = {f"ema/{key}": tensor + 1 for key, tensor in contents.tensors["model"].items()}
    tensors = {**contents.tensors, "optimizer": {**contents.tensors["optimizer"], **averages}}
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = save_checkpoint(store, 2, type(contents)(tensors, contents.state))
    target = exported(checkpoint, tmp_path, name, averaged=True)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).state_dict()
    for key, tensor in trained_weights(checkpoint, name).items():
        assert torch.equal(loaded[key], tensor + 1), key


def test_an_average_that_is_not_there_is_refused(one_process: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the checkpoint has no average of the weights"):
        exported(one_process("Mixtral"), tmp_path, "Mixtral", averaged=True)


def test_a_checkpoint_of_another_model_is_refused(one_process: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint has no .* of GptOssForCausalLM: it is of another model"):
        exported(one_process("Qwen3-MoE"), tmp_path, "GPT-OSS")
    assert not (tmp_path / "exported").exists()


def test_a_checkpoint_of_adapters_is_refused(one_process: Trained, tmp_path: Path) -> None:
    contents = load(one_process("Mixtral"))
    adapter = {"model.layers.0.mlp.experts.hosted.bank.0.up_lora_a": torch.ones(2, 2)}
    tensors = {**contents.tensors, "model": adapter}
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = save_checkpoint(store, 2, type(contents)(tensors, contents.state))
    with pytest.raises(UserError, match=r"holds LoRA adapters \(.*up_lora_a\), and the settings of its run"):
        exported(checkpoint, tmp_path, "Mixtral")
    assert not (tmp_path / "exported").exists()


def test_a_damaged_checkpoint_is_never_exported(one_process: Trained, tmp_path: Path) -> None:
    copy = tmp_path / "step_00000002"
    shutil.copytree(one_process("Mixtral"), copy)
    path = next(copy.glob("model_*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="has sha256"):
        exported(copy, tmp_path, "Mixtral")
    assert not (tmp_path / "exported").exists()


def test_a_folder_with_files_is_not_overwritten(one_process: Trained, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exported exists and is not empty; choose another folder"):
        exported(one_process("Mixtral"), tmp_path, "Mixtral")
    assert [path.name for path in (tmp_path / "exported").iterdir()] == ["mine.txt"]


def test_an_export_that_was_killed_leaves_no_folder_and_is_done_again(
    one_process: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = one_process("Mixtral")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_folder, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            exported(checkpoint, tmp_path, "Mixtral")
    assert not (tmp_path / "exported").exists()
    (tmp_path / "exported").mkdir()  # an empty folder is no obstacle
    shutil.rmtree(tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(exported(checkpoint, tmp_path, "Mixtral"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "exported"}


def test_progress_ends_with_all_bytes(one_process: Trained, tmp_path: Path) -> None:
    source = save_model_folder(tmp_path / "source", "Mixtral")
    seen: list[tuple[int, int]] = []
    checkpoint = one_process("Mixtral")
    export_checkpoint(
        checkpoint, source, tmp_path / "out", ExportForm(), lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0


def test_each_thread_reads_with_a_file_of_its_own(one_process: Trained) -> None:
    checkpoint = one_process("Mixtral")
    expected = load(checkpoint).tensors["model"]
    before = len(os.listdir("/proc/self/fd"))
    with CheckpointWeights(checkpoint) as weights, ThreadPoolExecutor(4) as pool:
        names = list(weights.stored) * 5
        for name, tensor in zip(names, pool.map(weights.read, names), strict=True):
            assert torch.equal(tensor, expected[name])
    assert len(os.listdir("/proc/self/fd")) == before
