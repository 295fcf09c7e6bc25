"""Files that bitsandbytes has quantised, against a matrix of its own and against files of whole weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experts.kernels.packed import dynamic_values, nf4_values
from experts.transformers.files.reading import read_weights
from experts.transformers.files.shards import Slice, open_shards
from experts.transformers.lora.packing import pack_frozen
from experts.transformers.registration import use
from harness.lm.families import build, tokens
from harness.lm.quantised_files import NF4_CONFIG, quantise_folder, state_text

# bitsandbytes 0.50.2 wrote these for sin(0.7 n) (1 + n / 50), n = 0 ... 191, as a matrix of 3 x 64.
CODES = bytes.fromhex(
    "7bcc953237bdc952237ceda41137ceda41128deea31128dfea30028efea30029ced941138ded931138ded931139dee931139ef"
    "e920039efe92003aefe92002aeed831149ded83113aeed82113aeed82013aefd72013befd72013befd71003bff"
)
SCALES = bytes.fromhex("0259ff")
SCALE_OF_SCALES = 1.3252830505371094
MEAN = 3.4148378372192383
SCALES_FP32 = [2.128251314163208, 3.37614107131958, 4.740120887756348]
FOUND = {0: "0x0p+0", 1: "0x1.71949p-1", 63: "0x1.600562p-2", 64: "0x1.7d0a0cp+0", 100: "0x1.388916p+1"}
"""Some of the numbers that bitsandbytes reads back."""
SHAPE = (3, 64)
STATE = "w.quant_state.bitsandbytes__nf4"
Changes = Mapping[str, Tensor | None]


def written(folder: Path, nested: bool, changes: Changes | None = None) -> Path:
    """Write the matrix as bitsandbytes does, with some tensors changed."""
    tensors: dict[str, Tensor] = {
        "w": torch.frombuffer(bytearray(CODES), dtype=torch.uint8).view(-1, 1),
        "w.absmax": torch.tensor(list(SCALES), dtype=torch.uint8) if nested else torch.tensor(SCALES_FP32),
        "w.quant_map": torch.tensor(nf4_values()),
        STATE: state_text(SHAPE, MEAN if nested else None),
    }
    if nested:
        tensors["w.nested_absmax"] = torch.tensor([SCALE_OF_SCALES])
        tensors["w.nested_quant_map"] = torch.tensor(dynamic_values(signed=True))
    kept = {name: tensor for name, tensor in {**tensors, **(changes or {})}.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": NF4_CONFIG}))
    return folder


@pytest.mark.parametrize("nested", [True, False])
def test_a_matrix_of_bitsandbytes_has_its_numbers(nested: bool, tmp_path: Path) -> None:
    with open_shards(written(tmp_path, nested)) as shards:
        assert list(shards.entries) == ["w"]
        numbers = shards.read(Slice("w"))
        assert torch.equal(shards.read(Slice("w", (1, 3))), numbers[1:3])
    assert numbers.shape == SHAPE
    if nested:
        found = {place: numbers.view(-1)[place].item() for place in FOUND}
        # The table of values is computed in fp64, and differs from the published one by its last bit.
        expected_numbers = {place: float.fromhex(text) for place, text in FOUND.items()}
        assert found == pytest.approx(expected_numbers, rel=3e-7)
    n = torch.arange(192.0)
    expected = (n * 0.7).sin() * (1 + n / 50)
    blocks = expected.view(-1, 64).abs().amax(1)
    # The widest gap of NF4 is 0.3 of the scale.
    assert ((numbers.view(-1, 64) - expected.view(-1, 64)).abs().amax(1) <= 0.16 * blocks).all()
    if not nested:
        assert numbers.view(-1, 64).abs().amax(1).tolist() == SCALES_FP32


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral", "DeepSeek-V3"])
def test_packed_weights_are_the_bytes_of_the_files(name: str, tmp_path: Path) -> None:
    """Experts and linear layers have the bytes that packing of the whole weights gives; a model with whole
    weights has the numbers that they stand for."""
    model = build(name, torch.float32)
    model.config._experts_implementation = None
    model.save_pretrained(tmp_path / "whole", max_shard_size="8KB")
    packed = pack_frozen(use(build(name, torch.float32)), "nf4")
    read_weights(packed, tmp_path / "whole")
    count = quantise_folder(tmp_path / "whole", tmp_path / "nf4")
    assert count > 20
    again = pack_frozen(use(build(name, torch.float32)), "nf4")
    read_weights(again, tmp_path / "nf4")
    whole = use(build(name, torch.float32))
    read_weights(whole, tmp_path / "nf4")
    found = dict(again.named_parameters())
    in_bytes = [key for key, parameter in packed.named_parameters() if parameter.dtype == torch.uint8]
    assert in_bytes
    assert [key for key, value in packed.named_parameters() if not torch.equal(found[key], value)] == []
    ids = tokens(2)
    torch.testing.assert_close(whole(input_ids=ids).logits, packed(input_ids=ids).logits)


DAMAGE: list[tuple[Changes, str]] = [
    ({"w.absmax": None}, r"is quantised: w\.absmax is missing beside w\.quant_state"),
    ({"w": torch.zeros(95, 1, dtype=torch.uint8)}, r"w has 95 bytes of codes, which 3 x 64 numbers do not"),
    (
        {STATE: None, STATE.replace("nf4", "fp4"): state_text(SHAPE, MEAN)},
        r"w is in fp4 of bitsandbytes; nf4 was needed",
    ),
    ({STATE: state_text(SHAPE, MEAN, blocksize=128)}, r"blocks of 128 and groups of 256; 64 and 256 were"),
    ({STATE: torch.tensor([1, 2], dtype=torch.uint8)}, r"__nf4 cannot be read"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGE)
def test_damaged_or_other_matrices_are_refused(changes: Changes, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path, True, changes)
    with pytest.raises(ValueError, match=message), open_shards(folder):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w.absmax": torch.zeros(2, dtype=torch.uint8)},
            r"w\.absmax has 2 numbers of .*; 3 of torch\.uint8",
        ),
        ({"w.quant_map": torch.zeros(16)}, r"w\.quant_map is not the table of values"),
        ({"w.nested_quant_map": torch.zeros(256)}, r"w\.nested_quant_map is not the table of values"),
    ],
)
def test_wrong_scales_and_tables_are_refused(changes: Changes, message: str, tmp_path: Path) -> None:
    with open_shards(written(tmp_path, True, changes)) as shards, pytest.raises(ValueError, match=message):
        shards.read(Slice("w"))


@pytest.mark.parametrize("changes", [{"bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": False}])
def test_other_forms_of_bitsandbytes_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, True)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NF4_CONFIG | changes}))
    with pytest.raises(ValueError, match=r"has quantization_config \(bitsandbytes\)"), open_shards(tmp_path):
        pass


def test_quantised_files_of_the_harness_are_whole(tmp_path: Path) -> None:
    """The other tensors of a folder stay as they are."""
    model = build("Qwen3-MoE", torch.float32)
    model.save_pretrained(tmp_path / "whole")
    quantise_folder(tmp_path / "whole", tmp_path / "nf4")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    found = load_file(tmp_path / "nf4" / "model.safetensors")
    norms = [name for name in whole if "norm" in name]
    assert norms
    assert all(torch.equal(found[name], whole[name]) for name in norms)
