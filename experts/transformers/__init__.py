"""Experts of Hugging Face ``transformers`` models, computed and placed by this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experts.transformers.balance import balance_loss, step_counts
    from experts.transformers.registration import expert_loads, restore, use

__all__ = ["balance_loss", "expert_loads", "restore", "step_counts", "use"]


def __getattr__(name: str) -> Any:
    """Import a public function at its first use."""
    if name in ("balance_loss", "step_counts"):
        from experts.transformers import balance

        return getattr(balance, name)
    if name in __all__:
        from experts.transformers import registration

        return getattr(registration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
