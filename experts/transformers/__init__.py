"""Experts of Hugging Face ``transformers`` models, computed and placed by this library."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experts.transformers.balance import balance_loss, step_counts, use_balance_bias
    from experts.transformers.files.initial import initialise_weights
    from experts.transformers.files.reading import read_weights
    from experts.transformers.lora.adapters import LoraOptions, add_lora, initialise_lora, merge_lora
    from experts.transformers.lora.packing import pack_frozen
    from experts.transformers.lora.peft_files import save_lora
    from experts.transformers.registration import expert_loads, restore, use

__all__ = [
    "LoraOptions",
    "add_lora",
    "balance_loss",
    "expert_loads",
    "initialise_lora",
    "initialise_weights",
    "merge_lora",
    "pack_frozen",
    "read_weights",
    "restore",
    "save_lora",
    "step_counts",
    "use",
    "use_balance_bias",
]
_MODULES = {
    "LoraOptions": "lora.adapters",
    "add_lora": "lora.adapters",
    "balance_loss": "balance",
    "expert_loads": "registration",
    "initialise_lora": "lora.adapters",
    "initialise_weights": "files.initial",
    "merge_lora": "lora.adapters",
    "pack_frozen": "lora.packing",
    "read_weights": "files.reading",
    "restore": "registration",
    "save_lora": "lora.peft_files",
    "step_counts": "balance",
    "use": "registration",
    "use_balance_bias": "balance",
}


def __getattr__(name: str) -> Any:
    """Import a public function at its first use."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
