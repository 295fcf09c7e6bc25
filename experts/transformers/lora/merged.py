"""The weights of a model with its adapters added, tensor by tensor, without a model in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from experts.kernels.packed import PackedForm
from experts.transformers.files.original import Stored
from experts.transformers.files.writing import Rows, TensorSource
from experts.transformers.lora.adapters import NAME
from experts.transformers.lora.peft_files import is_saved_adapter

_BASE = ".base_layer."


class MergedWeights:
    """A model's weights and the adapters of a checkpoint, as one source of tensors.

    ``base`` has the weights under the names of a checkpoint without adapters. ``scale`` multiplies the
    products of adapters. Buffers come from the checkpoint where it holds them."""

    def __init__(self, base: TensorSource, checkpoint: TensorSource, scale: float) -> None:
        self._base = base
        self._checkpoint = checkpoint
        self._scale = scale
        own = {name: stored for name, stored in checkpoint.stored.items() if name in base.stored}
        self.stored: Mapping[str, Stored] = {**base.stored, **own}
        self.adapted = frozenset(name for name in base.stored if self._factors(name) is not None)
        """The names of the weights that have adapters."""
        self._check_all_added()

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor, or a range of its rows."""
        factors = self._factors(name)
        if factors is None:
            source = self._checkpoint if name in self._checkpoint.stored else self._base
            return source.read(name, rows)
        left, right = (self._checkpoint.read(factor) for factor in factors)
        change = self._scale * ((left if rows is None else left[slice(*rows)]) @ right)
        # In the adapters' type: the sum is rounded once, to the type that is written.
        return self._base.read(name, rows).to(change.dtype) + change

    def _factors(self, name: str) -> tuple[str, str] | None:
        """Return the two adapters whose product is added to a weight; None where it has none."""
        layer = name.removesuffix(".weight")
        of_expert = (f"{name}_lora_a", f"{name}_lora_b")
        # A linear layer multiplies by the transposed weight.
        of_linear = (f"{layer}.lora_B.{NAME}.weight", f"{layer}.lora_A.{NAME}.weight")
        for factors in (of_expert, of_linear):
            if factors[0] in self._checkpoint.stored:
                return factors
        return None

    def _check_all_added(self) -> None:
        added = {factor for name in self.adapted for factor in self._factors(name) or ()}
        lost = [name for name in self._checkpoint.stored if is_saved_adapter(name) and name not in added]
        if lost:
            raise ValueError(
                f"the adapter {lost[0]} and {len(lost) - 1} others are for weights that the model's files do "
                "not hold: they are of another model, or of an output that is tied to its embedding"
            )


class FrozenWeights:
    """The weights that a checkpoint holds beside adapters, under their names without adapters."""

    def __init__(self, checkpoint: TensorSource) -> None:
        self._checkpoint = checkpoint
        self._saved_as = {
            name.replace(_BASE, "."): name for name in checkpoint.stored if not is_saved_adapter(name)
        }
        self.stored: Mapping[str, Stored] = {
            name: checkpoint.stored[saved] for name, saved in self._saved_as.items()
        }

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor, or a range of its rows."""
        return self._checkpoint.read(self._saved_as[name], rows)


class UnpackedWeights:
    """The numbers that a model's packed weights stand for: adapters were trained beside them.

    ``base`` has whole weights, which are packed first, or packed ones. The last matrix is kept: large ones
    are read some rows at a time."""

    def __init__(self, base: TensorSource, forms: Mapping[str, PackedForm]) -> None:
        self._base = base
        self._forms = forms
        self._last = threading.local()
        whole = {
            name: replace(stored, dtype=torch.float32, shape=_in_our_layout(name, forms[name]))
            for name, stored in base.stored.items()
            if name in forms and stored.dtype == torch.uint8
        }
        self.stored: Mapping[str, Stored] = {**base.stored, **whole}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor, or a range of its rows."""
        if name not in self._forms:
            return self._base.read(name, rows)
        if getattr(self._last, "name", None) != name:
            self._last.tensor = self._unpacked(name, self._forms[name])
            self._last.name = name
        return self._last.tensor if rows is None else self._last.tensor[slice(*rows)]

    def _unpacked(self, name: str, form: PackedForm) -> Tensor:
        tensor = self._base.read(name)
        if tensor.dtype != torch.uint8:
            tensor = form.pack(tensor.t() if _is_expert(name) else tensor)
        numbers = form.unpack(tensor, torch.float32)
        return numbers.t().contiguous() if _is_expert(name) else numbers


def _in_our_layout(name: str, form: PackedForm) -> tuple[int, int]:
    return form.shape[::-1] if _is_expert(name) else form.shape


def _is_expert(name: str) -> bool:
    """Whether a name in a checkpoint is that of an expert, whose matrices multiply from the right."""
    return ".hosted.bank." in name
