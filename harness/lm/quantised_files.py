"""Folders of models in the form in which bitsandbytes saves them: linear layers and experts in NF4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experts.kernels.packed import BLOCK, GROUP, PackedForm, dynamic_values, nf4_values

NF4_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


_IN_4_BITS = ("_proj.weight", "_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")


def state_text(shape: tuple[int, ...], mean: float | None, blocksize: int = BLOCK) -> Tensor:
    """Return the description of a matrix; without ``mean`` its scales are in fp32."""
    state = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "bfloat16", "shape": list(shape)}
    if mean is not None:
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": mean}
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def quantise_folder(source: Path, target: Path) -> int:
    """Write a folder of whole weights as bitsandbytes does; return the number of matrices in 4 bits."""
    shutil.copytree(source, target)
    count = 0
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(_IN_4_BITS)]:
            tensors |= quantised_parts(name, tensors.pop(name))
            count += 1
        save_file(tensors, path, metadata={"format": "pt"})
    index = target / "model.safetensors.index.json"
    if index.exists():
        files = {name: path.name for path in target.glob("*.safetensors") for name in load_file(path)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": NF4_CONFIG}))
    return count


def quantised_parts(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """Return a matrix as bitsandbytes saves it, with double quantisation."""
    outer, inner = matrix.shape
    blocks = -(-matrix.numel() // BLOCK)
    groups = -(-blocks // GROUP)
    packed = PackedForm("nf4", outer, inner).pack(matrix)
    sizes = [4 + 4 * groups, blocks, -(-matrix.numel() // 2)]
    floats, scales, codes = packed[: sum(sizes)].split(sizes)
    mean, *of_groups = floats.clone().view(torch.float32).tolist()
    return {
        name: codes.clone().view(-1, 1),
        f"{name}.absmax": scales.clone(),
        f"{name}.quant_map": torch.tensor(nf4_values()),
        f"{name}.nested_absmax": torch.tensor(of_groups),
        f"{name}.nested_quant_map": torch.tensor(dynamic_values(signed=True)),
        f"{name}.quant_state.bitsandbytes__nf4": state_text((outer, inner), mean),
    }
