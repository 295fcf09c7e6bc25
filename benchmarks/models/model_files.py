"""Loading and export of a model with the layer shapes of Qwen3-30B-A3B: seconds, bytes, peak memory.

A random model of the real class is written as safetensors shards in bf16, and as a checkpoint in fp32 of one
host per layer. Each measured stage is a process of its own: a host reads its share into a placed model
in bf16, and the checkpoint is exported in bf16. Files that were just written are in the page cache.

    python -m benchmarks.models.model_files --folder DIR --layers 1 --experts 32 --vocabulary 16000   # 0.5 GB
    python -m benchmarks.models.model_files --folder DIR --layers 16                                  # 20 GB
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.balance import moe_layers
from experts.model import place
from experts.transformers.files.original import OriginalNames, Stored, plan_writing
from experts.transformers.files.pieces import no_progress
from experts.transformers.files.reading import read_weights
from experts.transformers.files.writing import write_weights
from experts.transformers.registration import use
from orchestrator.checkpoint.files import HostPart, write_manifest, write_part
from orchestrator.train.export.weights import ExportForm, export_checkpoint

GB = 10**9


def model_config(layers: int, experts: int, vocabulary: int) -> Any:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "dtype": "bfloat16",
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    return Qwen3MoeConfig(**sizes)


def without_memory(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


class RandomWeights:
    """The tensors of a model as a checkpoint names them, drawn when they are read."""

    def __init__(self, original: OriginalNames, dtype: torch.dtype) -> None:
        tensors = original.model_tensors()
        stored: dict[str, Stored] = {}
        for name, tensor in tensors.items():
            names = original.stored_as(name, {})
            shape = tuple(tensor.shape) if names == [name] else original.expert_shape(name, tensor)
            stored |= dict.fromkeys(names, Stored(dtype, shape))
        self.stored: Mapping[str, Stored] = stored

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        shape = self.stored[name].shape if rows is None else (rows[1] - rows[0], *self.stored[name].shape[1:])
        return torch.empty(shape, dtype=self.stored[name].dtype).uniform_(-0.02, 0.02)


def write_model(folder: Path, config: Any) -> None:
    original = OriginalNames(without_memory(config, torch.bfloat16))
    weights = RandomWeights(original, torch.bfloat16)
    folder.mkdir(parents=True)
    plan = plan_writing(original, weights.stored, None)
    write_weights(original, plan, weights, folder, 5 * GB, no_progress)
    config.save_pretrained(folder)


def write_checkpoint(folder: Path, config: Any) -> None:
    """Write one host's files for each layer, and one for the rest."""
    weights = RandomWeights(OriginalNames(without_memory(config, torch.float32)), torch.float32)
    folder.mkdir(parents=True)
    by_layer: dict[str, list[str]] = {}
    for name in weights.stored:
        by_layer.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    files: dict[str, Any] = {}
    for rank, names in enumerate(by_layer.values()):
        tensors = {name: weights.read(name) for name in names}
        experts = {name for name in names if ".bank." in name}
        state = {} if rank == 0 else None
        files |= write_part(folder, rank, HostPart({"model": tensors}, experts, state=state))
    write_manifest(folder, 1, files)


def read_share(folder: Path, config: Any, rank: int, hosts: int) -> dict[str, float]:
    model = use(without_memory(config, torch.bfloat16))
    host_of = [[expert % hosts for expert in range(len(layer.load_E))] for _, layer in moe_layers(model)]
    place(model, host_of, rank)
    model.to_empty(device="cpu")
    result = read_weights(model, folder)
    held = sum(parameter.nbytes for parameter in model.parameters())
    return {"bytes": result.bytes_read, "held": held, "all": result.file_bytes}


def export(checkpoint: Path, model: Path, target: Path) -> dict[str, float]:
    result = export_checkpoint(checkpoint, model, target, ExportForm("bf16"), no_progress)
    return {"bytes": result.num_bytes, "held": 0, "all": result.num_bytes}


def measured(stage: Callable[..., dict[str, float] | None], *arguments: Any) -> dict[str, float]:
    """Run a stage in a process of its own; return its figures, its seconds and its peak of memory."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (stage, arguments))


def _measure(stage: Callable[..., dict[str, float] | None], arguments: tuple[Any, ...]) -> dict[str, float]:
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401 - counted as memory before

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began_s = perf_counter()
    figures = stage(*arguments) or {}
    seconds = perf_counter() - began_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**figures, "seconds": seconds, "peak": peak, "before": before}


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    config = model_config(options.layers, options.experts, options.vocabulary)
    model, checkpoint = options.folder / "model", options.folder / "step_00000001"
    measured(write_model, model, config)
    measured(write_checkpoint, checkpoint, config)
    for hosts in options.hosts:
        figures = measured(read_share, model, config, 0, hosts)
        yield _row(f"read as host 0 of {hosts}", figures)
    yield _row("export", measured(export, checkpoint, model, options.folder / "exported"))


def _row(name: str, figures: dict[str, float]) -> list[str]:
    keys = ("all", "bytes", "held", "before", "peak")
    sizes = [f"{figures[key] / GB:.2f}" for key in keys]
    return [name, *sizes, f"{figures['seconds']:.1f}", f"{figures['bytes'] / GB / figures['seconds']:.2f}"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the files")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    columns = ["stage", "all GB", "moved GB", "held GB", "RSS before", "RSS peak", "seconds", "GB/s"]
    table = markdown_table(columns, list(rows(options)))
    note = "All sizes in GB: of all tensors, moved, held by the host, and the peak of the process.\n\n"
    publish(header("Files of a model", options) + note + table, options.out)


if __name__ == "__main__":
    main()
