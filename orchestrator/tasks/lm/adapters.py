"""The adapters (LoRA) of a language model, by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from experts.token_dropout import token_dropouts
from experts.transformers.files.fingerprint import fingerprint
from experts.transformers.lora.adapters import LoraOptions, add_lora
from orchestrator.config.sections.model import ModelSettings
from orchestrator.errors import UserError


def lora_options(settings: ModelSettings) -> LoraOptions | None:
    """Return the adapters that the settings ask for; None without ``--lora``."""
    if settings.lora is None:
        return None
    alpha = 2.0 * settings.lora if settings.lora_alpha is None else settings.lora_alpha
    return LoraOptions(settings.lora, alpha, settings.lora_targets, settings.lora_dropout)


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Freeze a model and give it adapters, in place."""
    try:
        add_lora(model, options)
    except (ValueError, ImportError) as error:
        raise UserError(f"--lora {options.rank}: {error}") from None
    if options.dropout and not token_dropouts(model):
        raise UserError(
            f"--lora-dropout is {options.dropout}, but only experts have adapters here, and those have no "
            "dropout; leave it out, or add linear layers to --lora-targets"
        )


def leave_to_files(model: nn.Module, folder: Path | None) -> None:
    """Let checkpoints leave out the frozen weights, which are read from a folder at each start.

    A model that only is planned is without one: its files need not be here."""
    adapted: Any = model
    adapted.frozen_base = "not read" if folder is None else fingerprint(folder)
