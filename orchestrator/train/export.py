"""Writes a checkpoint as the folder of a ``transformers`` model, which ``from_pretrained`` loads.

Tensors are streamed from the checkpoint's files: no model is built in memory, and no GPU or cluster is
needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from experts.transformers.files.original import OriginalNames, plan_writing
from experts.transformers.files.shards import INDEX
from experts.transformers.files.writing import write_weights
from orchestrator.errors import UserError
from orchestrator.storage.local_files import sync
from orchestrator.train.checkpoint.weight_source import CheckpointWeights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The types of weights in files, by their names in flags."""
_CONFIG = "config.json"
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
_DTYPE_KEYS = ("dtype", "torch_dtype")

OnProgress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint that are done, and all of them."""


@dataclass(frozen=True)
class ExportForm:
    """The form of an export."""

    dtype: str | None = None
    """bf16, fp16 or fp32; None for the type in config.json, else that of the checkpoint."""
    shard_bytes: int = 5 * 10**9
    averaged: bool = False
    """Whether to write the moving average in place of the weights."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    num_bytes: int
    """The bytes of all tensors."""
    seconds: float
    left_out: tuple[str, ...]
    """Tensors of the checkpoint that the model has no place for."""


def export_checkpoint(
    checkpoint: Path, model_folder: Path, target: Path, form: ExportForm, on_progress: OnProgress
) -> Exported:
    """Write a checkpoint into a new folder, which appears when all of it is written.

    ``model_folder`` has the model's config.json and tokenizer."""
    began_s = perf_counter()
    check_target(target)
    config = _read_config(model_folder)
    original = OriginalNames(_model_without_memory(model_folder))
    dtype = DTYPES[form.dtype] if form.dtype else _dtype_of(config)
    partial = _new_partial(target)
    try:
        with CheckpointWeights(checkpoint, form.averaged) as weights:
            _check_no_adapters(checkpoint, weights)
            plan = plan_writing(original, weights.stored, dtype)
            total = write_weights(original, plan, weights, partial, form.shard_bytes, on_progress)
        _copy_small_files(model_folder, partial)
        if dtype is not None:
            config = _with_dtype(config, str(dtype).removeprefix("torch."))
        (partial / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _publish(partial, target)
    except ValueError as error:
        raise UserError(f"{checkpoint} cannot be written as a model of {model_folder}: {error}") from None
    return Exported(target, total, perf_counter() - began_s, plan.unused)


def _check_no_adapters(checkpoint: Path, weights: CheckpointWeights) -> None:
    """Refuse a checkpoint of LoRA, which holds adapters in place of the model's weights."""
    adapters = [name for name in weights.stored if "lora_" in name]
    if adapters:
        raise UserError(
            f"{checkpoint} holds LoRA adapters ({adapters[0]}), which export does not merge. In Python: "
            "merge_lora and restore of experts.transformers, then save_pretrained"
        )


def check_target(target: Path) -> None:
    """Raise ``UserError`` unless the folder is new or empty."""
    try:
        is_used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; choose another folder") from None
    if is_used:
        raise UserError(f"{target} exists and is not empty; choose another folder, or remove it")


def _new_partial(target: Path) -> Path:
    """Create the folder that is written, in place of that of an export that was killed."""
    partial = target.absolute().with_name(f".exporting-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write beside {target}: {error.strerror}; choose another folder") from None
    return partial


def _publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name."""
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if target.exists():
        target.rmdir()  # it is empty
    os.rename(partial, target)
    sync(target.absolute().parent)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no readable config of a transformers model; give its folder with --model")
    return config


def _model_without_memory(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{folder / _CONFIG} describes no causal language model that this version of transformers knows: "
            f"{reason}"
        ) from None


def _dtype_of(config: dict[str, Any]) -> torch.dtype | None:
    """Return the type of weights that a config names; None for one that is unknown or missing."""
    names = [config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)]
    found = getattr(torch, names[0], None) if names else None
    return found if found in DTYPES.values() else None


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[0]]
    return config | dict.fromkeys(keys, name)


def _copy_small_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, the generation config and their like."""
    for pattern in _SMALL_FILES:
        for path in source.glob(pattern):
            is_index = path.name.endswith(".index.json") or path.name == INDEX
            if path.is_file() and not is_index and path.name != _CONFIG:
                shutil.copyfile(path, target / path.name)
