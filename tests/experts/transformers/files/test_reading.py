"""Weights read from safetensors files, by each of three hosts with uneven experts, against
``from_pretrained``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3MoeForCausalLM,
)

from experts.transformers.files import reading
from experts.transformers.files.reading import read_weights
from experts.transformers.registration import use
from harness.lm.families import COMMON, FAMILIES, build, tokens
from harness.storage.model_files import (
    HOSTS,
    assert_holds,
    built_on_host,
    header_bytes,
    held_bytes,
    on_meta,
    tensor_names,
)


def saved(folder: Path, name: str, **options: Any) -> Path:
    model = build(name, torch.float32)
    model.config._experts_implementation = None
    model.save_pretrained(folder, **{"max_shard_size": "8KB", **options})
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


@pytest.mark.extended(but_first=3)
@pytest.mark.parametrize("original_names", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_host_reads_its_share_of_a_family(name: str, original_names: bool, tmp_path: Path) -> None:
    saved(tmp_path, name, save_original_format=original_names)
    expected = loaded(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for rank in HOSTS:
        model = built_on_host(expected.config, rank)
        result = read_weights(model, tmp_path)
        assert_holds(model, expected)
        assert result.unexpected == ()
        assert result.bytes_read == held_bytes(model) + header_bytes(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_one_process_has_the_logits_of_from_pretrained(name: str, tmp_path: Path) -> None:
    expected = loaded(saved(tmp_path, name))
    model = built_on_host(expected.config, None).eval()
    read_weights(model, tmp_path)
    ids = tokens(2)
    torch.testing.assert_close(model(input_ids=ids).logits, expected.eval()(input_ids=ids).logits)


def edit_header(path: Path, change: Any) -> None:
    """Rewrite a file with a header that ``change`` has edited in place."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def file_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def host(folder: Path, rank: int = 1) -> Any:
    return built_on_host(AutoConfig.from_pretrained(folder, dtype=torch.float32), rank)


def test_a_single_file_without_an_index_is_read(tmp_path: Path) -> None:
    expected = loaded(saved(tmp_path, "Qwen3-MoE", max_shard_size="1GB"))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    model = host(tmp_path)
    read_weights(model, tmp_path)
    assert_holds(model, expected)


@pytest.mark.parametrize("original_names", [True, False])
def test_experts_beyond_the_tenth_keep_their_order(original_names: bool, tmp_path: Path) -> None:
    config = build("Mixtral").config
    config.num_local_experts = 12
    config._experts_implementation = None
    MixtralForCausalLM(config).save_pretrained(tmp_path, save_original_format=original_names)
    expected = loaded(tmp_path)
    model = host(tmp_path)
    read_weights(model, tmp_path)
    assert_holds(model, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_converted_to_the_types_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    build("GPT-OSS", torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8KB")
    expected = loaded(tmp_path, dtype)
    model = built_on_host(expected.config, 0)
    read_weights(model, tmp_path)
    assert next(model.parameters()).dtype == dtype
    assert_holds(model, expected)


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    expected = loaded(saved(tmp_path, "DeepSeek-V3"))
    model = host(tmp_path)
    progress: list[tuple[int, int]] = []
    result = read_weights(model, tmp_path, lambda done, total: progress.append((done, total)))
    assert_holds(model, expected)
    assert result.bytes_read == held_bytes(model) + header_bytes(tmp_path)
    done = [entry[0] for entry in progress]
    assert done == sorted(done)
    assert progress[0] == (0, held_bytes(model))
    assert progress[-1] == (held_bytes(model), held_bytes(model))


def test_tied_embeddings_are_read_once_and_stay_tied(tmp_path: Path) -> None:
    config = build("Qwen3-MoE").config
    config.tie_word_embeddings = True
    config._experts_implementation = None
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path, max_shard_size="8KB")
    assert "lm_head.weight" not in tensor_names(tmp_path)
    expected = loaded(tmp_path)
    model = host(tmp_path)
    result = read_weights(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_holds(model, expected)
    assert result.bytes_read == held_bytes(model) + header_bytes(tmp_path)


def test_a_dense_model_is_read_too(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**COMMON, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = LlamaConfig(**sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="4KB")
    expected = loaded(tmp_path)
    model = on_meta(config)
    model.to_empty(device="cpu")
    read_weights(model, tmp_path)
    assert_holds(model, expected)


def test_tensors_that_the_model_has_not_are_named_and_not_read(tmp_path: Path) -> None:
    saved(tmp_path, "Mixtral", max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.extra.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    model = host(tmp_path)
    result = read_weights(model, tmp_path)
    assert result.unexpected == ("model.layers.0.extra.weight",)
    assert result.bytes_read == held_bytes(model) + header_bytes(tmp_path)


def test_layers_for_speculative_decoding_are_expected(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM have one more layer in their files, which ``transformers`` ignores."""
    saved(tmp_path, "DeepSeek-V3", max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.61.eh_proj.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert read_weights(host(tmp_path), tmp_path).unexpected == ()


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    config = loaded(saved(tmp_path, "Mixtral")).config
    with pytest.raises(ValueError, match=r"have no memory to read into; call model\.to_empty"):
        read_weights(use(on_meta(config)), tmp_path)


NORM = "model.norm.weight"


def missing_shard(folder: Path) -> None:
    file_with(folder, NORM).unlink()


def cut_off(folder: Path) -> None:
    path = file_with(folder, NORM)
    path.write_bytes(path.read_bytes()[:-5])


def empty_file(folder: Path) -> None:
    file_with(folder, NORM).write_bytes(b"")


def page_of_a_web_server(folder: Path) -> None:
    file_with(folder, NORM).write_bytes(b"<html>404 not found</html>")


def unknown_dtype(folder: Path) -> None:
    edit_header(file_with(folder, NORM), lambda header: header[NORM].update(dtype="F7"))


def shard_of_another_model(folder: Path) -> None:
    path = file_with(folder, NORM)
    edit_header(path, lambda header: header.update(other=header.pop(NORM)))


def missing_weight(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    edit_header(file_with(folder, NORM), lambda header: header.update(other=header.pop(NORM)))
    content["weight_map"]["other"] = content["weight_map"].pop(NORM)
    index.write_text(json.dumps(content))


def lost_expert(folder: Path) -> None:
    tensors = {key: tensor for path in shards_of(folder) for key, tensor in load_file(path).items()}
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    for path in shards_of(folder):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")


def other_vocabulary(folder: Path) -> None:
    change_config(folder, vocab_size=40)


def other_expert_size(folder: Path) -> None:
    change_config(folder, moe_intermediate_size=8)


def other_expert_count(folder: Path) -> None:
    change_config(folder, num_experts=6, num_local_experts=6)


def quantised(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8"})


def quantised_file(folder: Path) -> None:
    path = file_with(folder, NORM)
    tensors = load_file(path)
    save_file(tensors | {NORM: tensors[NORM].to(torch.float8_e4m3fn)}, path)


def pickled(folder: Path) -> None:
    for path in (*shards_of(folder), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_weights(folder: Path) -> None:
    for path in (*shards_of(folder), folder / "model.safetensors.index.json"):
        path.unlink()


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def index_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][NORM] = "../secret.safetensors"
    index.write_text(json.dumps(content))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGE: list[tuple[Any, str]] = [
    (missing_shard, r"model-0000\d-of-.*\.safetensors is missing; download or copy it again"),
    (cut_off, r"\.safetensors is damaged or cut off \(the tensors end at .*download or copy it again"),
    (empty_file, r"\.safetensors is damaged or cut off \(the file has no header"),
    (page_of_a_web_server, r"is damaged or cut off \(the header has a length of"),
    (unknown_dtype, r"is damaged or cut off \('model\.norm\.weight' has the type F7"),
    (shard_of_another_model, r"does not hold model\.norm\.weight, which .*index\.json says it does"),
    (
        missing_weight,
        r"have no model\.norm\.weight, which .* needs\. They hold other, which the model has not",
    ),
    (lost_expert, r"hold 6 of .*experts\.0\.up_proj.* the model has 7 experts"),
    (other_vocabulary, r"weight in .* has shape \(31, 16\); the model of config\.json needs \(40, 16\)"),
    (other_expert_size, r"experts.* has shape \((12, 16|16, 6)\); the model of config\.json needs"),
    (other_expert_count, r"hold 7 of .*experts\.0.* the model has 6 experts"),
    (quantised, r"is quantised: config\.json has quantization_config \(fp8\)\. Training needs whole weights"),
    (quantised_file, r"is quantised: model\.norm\.weight is torch\.float8_e4m3fn"),
    (pickled, r"holds pytorch_model\.bin and no safetensors.*not read\. Convert them.*save_pretrained"),
    (no_weights, r"holds no model\.safetensors and no model\.safetensors\.index\.json"),
    (no_index, r"holds model-00001-of.*, but no model\.safetensors\.index\.json"),
    (broken_index, r"index\.json is no index of weights"),
    (index_outside, r"names the file '\.\./secret\.safetensors', which is not in its folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_bad_folder_is_refused_with_its_fault(damage: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path, "Qwen3-MoE")
    damage(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        read_weights(built_on_host(config, 0), tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Mixtral")
    with pytest.raises(ValueError, match="is not a folder; give the folder of a model"):
        read_weights(host(tmp_path), tmp_path / "elsewhere")
