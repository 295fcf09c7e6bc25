"""The folder of a model of ``transformers``: on this machine, at an address, or from the hub."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.storage.address import as_url
from orchestrator.storage.local_copy import local_copy

CONFIG = "config.json"
_QUANTISATION = "quantization_config"
KEPT = "hf"
"""The folder below a run's with the config and the tokenizer of its model."""
INSTALL = "pip install 'expert-orchestrator[hf]'"
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE", "LICENSE.md")
"""The config, the tokenizer, the generation config and their like. None of them is a pickle or code."""
_MAX_SMALL_BYTES = 2**27
"""No tokenizer is as large; data that lies beside a model may be."""
_INDEX = ".index.json"
_TEMPLATE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 2**20
_WEIGHT_FILES = ("*.safetensors",)
_NO_CODE = (
    "models with code of their own are not trained (nothing from a model's folder is executed): give a model "
    "of a family that transformers itself has"
)


def model_folder(model: str, *, with_weights: bool) -> Path:
    """Return the folder of ``--model``: config, tokenizer and, where they are needed, weights.

    A model of the hub is downloaded once into its cache."""
    if as_url(model) is not None:
        return _checked(model, local_copy("--model", model))
    path = Path(model).expanduser()
    if path.name == CONFIG and path.is_file():
        return path.parent
    if path.is_dir():
        return _checked(model, path)
    if path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise UserError(
            f"--model {model}: there is no such folder; give a folder with config.json, or the id of a model "
            "on the Hugging Face hub (organisation/name)"
        )
    return _from_hub(model, with_weights)


def copy_small_files(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy the config, the tokenizer and their like from the folder of a model: no weights."""
    for pattern in _SMALL_FILES:
        for path in source.glob(pattern):
            is_small = path.is_file() and path.stat().st_size <= _MAX_SMALL_BYTES
            if is_small and not path.name.endswith(_INDEX) and path.name not in without:
                shutil.copyfile(path, target / path.name)
    if (target / CONFIG).exists():
        _leave_out_quantisation(target / CONFIG)


def _leave_out_quantisation(path: Path) -> None:
    """Let a copied config say nothing of the form of its model's weights: those of a run are whole."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # the code that builds the model reads it, and names the fault
    if isinstance(config, dict) and config.pop(_QUANTISATION, None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def keep_small_files(source: Path, run_dir: Path, template: str | None = None) -> None:
    """Copy the config and the tokenizer of a model into a run folder, unless an earlier start has.

    ``template`` is a chat template in place of the tokenizer's own."""
    kept = run_dir / KEPT
    if kept.exists():
        return
    partial = kept.with_name(f".{KEPT}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    copy_small_files(source, partial)
    if template is not None:
        (partial / _TEMPLATE).write_text(template, encoding="utf-8")
    # As a whole or not at all: a part of a tokenizer is another one.
    os.rename(partial, kept)


def kept_folder(run_dir: Path | None) -> Path | None:
    """Return the folder with the config and the tokenizer that a run has kept; None if there is none."""
    kept = run_dir / KEPT if run_dir is not None else None
    if kept is None or not (kept / CONFIG).exists():
        return None
    # The folder of a run may come from anywhere: a link in it could name a private file of the reader, which
    # an export would copy.
    for path in (kept, *kept.iterdir()):
        mode = path.lstat().st_mode
        is_kept = stat.S_ISDIR(mode) if path == kept else stat.S_ISREG(mode)
        if not is_kept or (path != kept and path.lstat().st_size > _MAX_SMALL_BYTES):
            raise UserError(
                f"{path} is a link, no file, or larger than {_MAX_SMALL_BYTES:,} bytes, which no run writes; "
                "remove it, or copy the model's file there"
            )
    return kept


def chosen_template(path: Path, kept: Path | None) -> str:
    """Return the chat template of ``--chat-template``. A run keeps its first one, in ``kept``."""
    if kept is None:
        return _read_template(path)
    template = _read_template(kept / _TEMPLATE)
    # The file may have moved since; one that has changed would make other tokens of the same data.
    if path.exists() and _read_template(path) != template:
        raise UserError(
            f"--chat-template {path}: the run began with another template, {kept / _TEMPLATE}; "
            "give that one, or start another run"
        )
    return template


def _read_template(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise UserError(f"--chat-template {path}: the file has more than {_MAX_TEMPLATE_BYTES:,} bytes")
        # A pipe or a device has no end.
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {path} cannot be read: {_first_line(error)}") from None
    if not text or not text.strip():
        problem = "there is no such file" if text is None else "the file is empty"
        raise UserError(f"--chat-template {path}: {problem}; a file with a Jinja template was needed")
    return text


def has_checkpoint(run_dir: Path | None) -> bool:
    """Whether a run folder has a checkpoint, damaged or not."""
    return run_dir is not None and any((run_dir / "checkpoints").glob("step_*/manifest.json"))


def load_config(folder: Path) -> Any:
    """Return the configuration of the model in a folder."""
    from transformers import AutoConfig

    try:
        # Without the argument transformers asks whether to run the folder's code.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(
            f"{folder / CONFIG} is no configuration that this version of transformers knows: "
            f"{_first_line(error)}; {_NO_CODE}"
        ) from None
    # Weights in 4 bits are read by our own code.
    if hasattr(config, _QUANTISATION):
        delattr(config, _QUANTISATION)
    return config


def empty_causal_lm(config: Any, **settings: Any) -> Any:
    """Return the causal language model of a configuration, on the default device."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)
    except ValueError as error:
        raise UserError(f"--model is no causal language model: {_first_line(error)}; {_NO_CODE}") from None


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, RecursionError) as error:
        raise _no_tokenizer(folder, _first_line(error)) from None
    # Without the files of a tokenizer, transformers makes an empty one of some families, and says nothing.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise _no_tokenizer(folder, "its vocabulary is empty")
    return tokenizer


def _no_tokenizer(folder: Path, reason: str) -> UserError:
    return UserError(
        f"{folder} has no tokenizer that can be read: {reason}; the folder of a model needs "
        "its tokenizer.json and tokenizer_config.json: copy them there (nothing from a model's folder is "
        "executed, so a tokenizer with code of its own cannot be used)"
    )


def check_installed() -> None:
    """Raise UserError unless ``transformers`` is installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(f"the task lm needs transformers ({error}): {INSTALL}") from None


def _checked(model: str, folder: Path) -> Path:
    if (folder / CONFIG).is_file():
        return folder
    raise UserError(
        f"--model {model}: the folder has no config.json; give the folder of a transformers model"
    )


def _from_hub(model: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if with_weights else ())]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError):
        problem = "neither a folder here nor a model on the Hugging Face hub that you may read"
    except (LocalEntryNotFoundError, OSError) as error:
        problem = f"no folder here, and the Hugging Face hub cannot be reached ({_first_line(error)})"
    raise UserError(f"--model {model}: {problem}; give the folder of a model, or the id of one on the hub")


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
