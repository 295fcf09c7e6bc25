"""The bank: the experts of this host, stacked by hidden size.

A grouped product can then compute all experts of one size. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from experts.kernels import fused_experts
from experts.kernels.adapters import Adapters, adapted_matrix
from experts.kernels.autocast import without_autocast
from experts.kernels.compiling import uncompiled
from experts.kernels.fused_experts import experts_fused
from experts.kernels.general import Activation, experts_general
from experts.kernels.grouped import choose_kernel, experts_grouped, size_multiple
from experts.kernels.loop import activate, experts_loop, row_counts
from experts.kernels.packed import PackedForm
from experts.kernels.packed_product import Matrices, PackedStack
from experts.kernels.row_products import SIZE_MULTIPLE
from experts.moe.weight_copy import GradientSink, WeightCopy, diverted
from experts.tokens.dispatch import copy_rows, sum_rows
from experts.types import Kernel, Kind, Packing, RowMap

MATRICES = ("up", "down")
"""The two matrices of an expert."""
BIASES = ("up_bias", "down_bias")
"""The biases of an expert that has them, one for each matrix."""


_MAX_UNUSED_BYTES = 64 * 2**20
"""Limit of the memory that the fused kernel may waste: all rows of its buffer are as wide as the widest
expert. Above it the host waits for the rows of each size, and allocates no more than they need: batches that
large take long to compute, so that the wait costs little."""


@dataclass(frozen=True)
class ExpertForm:
    """The computation of an expert besides its sizes.

    ``kind`` "swiglu" has two matrices before the activation, gate and value, in one stack; "ffn" has
    one. ``activation`` replaces the activation of the kind: a function of hidden rows, without
    parameters. ``bias``: each of the two products has a bias. ``adapters``: low-rank changes of the
    matrices, which are frozen then. ``packing``: the matrices are frozen and in 4 or 8 bits."""

    kind: Kind = "swiglu"
    activation: Activation | None = None
    bias: bool = False
    adapters: Adapters | None = None
    packing: Packing | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The parameters of an expert."""
        own = (*MATRICES, *BIASES) if self.bias else MATRICES
        return (*own, *self.adapters.roles) if self.adapters else own

    @property
    def is_plain(self) -> bool:
        """Whether an expert has only two matrices and the activation of its kind."""
        return self.activation is None and not self.bias and self.adapters is None and self.packing is None

    def shape(self, role: str, width: int, hidden: int) -> tuple[int, ...]:
        """Return the shape of one expert's parameter as it is stored: a packed matrix is a row of bytes."""
        packed = self.packed(role, width, hidden)
        return self.whole_shape(role, width, hidden) if packed is None else (packed.num_bytes,)

    def packed(self, role: str, width: int, hidden: int) -> PackedForm | None:
        """Return the form of one expert's packed matrix; None for a parameter that is not packed."""
        if self.packing is None or role not in MATRICES:
            return None
        inner, outer = self.whole_shape(role, width, hidden)
        # Files of most families have the two halves of the first matrix as two, each with scales of its own.
        parts = 2 if role == "up" and self.kind == "swiglu" else 1
        return PackedForm(self.packing, outer, inner, parts)

    def whole_shape(self, role: str, width: int, hidden: int) -> tuple[int, ...]:
        """Return the shape of one expert's parameter in which it computes."""
        inner = 2 * hidden if self.kind == "swiglu" else hidden
        shapes = {"up": (width, inner), "down": (hidden, width), "up_bias": (inner,), "down_bias": (width,)}
        if role in shapes:
            return shapes[role]
        assert self.adapters is not None, f"an expert has no {role}"
        return self.adapters.shape(role, shapes[adapted_matrix(role)])

    def activate(self, hidden_RH: Tensor, weights_R: Tensor) -> Tensor:
        """Apply the activation between the two products, and the weight of each row."""
        if self.activation is None:
            return activate(hidden_RH, weights_R, self.kind)
        return self.activation(hidden_RH) * weights_R.to(hidden_RH.dtype).unsqueeze(1)


@dataclass(frozen=True)
class SizeClass:
    """Experts of one hidden size: their rows in the gate, in stacked order."""

    hidden: int
    rows: tuple[int, ...]


def size_classes(sizes: Sequence[int], held: Sequence[int]) -> tuple[SizeClass, ...]:
    """Group the held experts by hidden size, smallest first. Within a class they are in the order of rows."""
    classes: list[SizeClass] = []
    for hidden in sorted({sizes[expert] for expert in held}):
        rows = tuple(expert for expert in sorted(held) if sizes[expert] == hidden)
        classes.append(SizeClass(hidden, rows))
    return tuple(classes)


_WITHOUT_MEMORY: ContextVar[bool] = ContextVar("banks are built without memory", default=False)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build banks on the meta device: only the banks that are kept get memory, by ``materialise``."""
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


def banks_have_memory() -> bool:
    """Whether banks that are built now get memory for their weights."""
    return not _WITHOUT_MEMORY.get()


class ExpertBank(nn.Module):
    """Experts of any sizes: all of a layer, or those of this host, by their rows in the gate.

    A slot is an expert's place in stacked order. ``slot_E`` maps rows to slots, -1 for experts of
    other hosts. ``ids`` are the permanent ids of all experts of the layer, by row: names of saved
    tensors and initial weights depend on them. ``form`` is the computation of an expert. ``owned`` are
    the experts that this host counts and saves: all that it holds, except copies that another host owns.
    With ``fp8`` the products of tokens in bf16 have operands in fp8; it needs ``fp8_obstacle`` to be None.
    ``gradient_sink`` takes the gradient of each use of the weights, in place of their ``grad``."""

    slot_E: Tensor

    def __init__(
        self,
        width: int,
        sizes: Sequence[int],
        form: ExpertForm | Kind = "swiglu",
        held: Sequence[int] | None = None,
        ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.sizes = tuple(sizes)
        self.ids = tuple(range(len(sizes))) if ids is None else tuple(ids)
        self.form = form if isinstance(form, ExpertForm) else ExpertForm(form)
        self.kernel: Kernel = "auto"
        self.fp8 = False
        self.recomputes = False
        self.held = tuple(range(len(sizes))) if held is None else tuple(sorted(held))
        self.owned = self.held
        self.copies: dict[str, WeightCopy] = {}
        self.gradient_sink: GradientSink | None = None
        self.classes = size_classes(sizes, self.held)
        self.register_buffer("slot_E", self.slots(), persistent=False)
        device = "meta" if _WITHOUT_MEMORY.get() else None
        for group in self.classes:
            for role in self.form.roles:
                weights = self._initial(role, group, device)
                self.set_stack(group, role, weights, weights.is_floating_point())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one training: copies of weights, and the receiver of gradients."""
        return {**super().__getstate__(), "copies": {}, "gradient_sink": None}

    @property
    def kind(self) -> Kind:
        return self.form.kind

    def _initial(self, role: str, group: SizeClass, device: str | None) -> Tensor:
        """Return a stack of random matrices; other roles, and packed matrices, begin with zeros."""
        shape = self.form.shape(role, self.width, group.hidden)
        if self.form.packed(role, self.width, group.hidden) is not None:
            return torch.zeros((len(group.rows), *shape), dtype=torch.uint8, device=device)
        std = shape[0] ** -0.5 if role in MATRICES else 0.0
        return torch.empty((len(group.rows), *shape), device=device).normal_(0.0, std)

    def slots(self) -> Tensor:
        """Return ``slot_E``, on the CPU."""
        slot_E = [-1] * len(self.sizes)
        stacked = [expert for group in self.classes for expert in group.rows]
        for slot, expert in enumerate(stacked):
            slot_E[expert] = slot
        return torch.tensor(slot_E, dtype=torch.int64)

    def stacks(self) -> Iterator[tuple[SizeClass, str, nn.Parameter]]:
        """Yield each stacked parameter with its class and its role (``up``, ``down`` or a bias)."""
        for group in self.classes:
            for role in self.form.roles:
                yield group, role, self.get_parameter(f"{role}_{group.hidden}")

    def set_stack(self, group: SizeClass, role: str, weights: Tensor, trains: bool = True) -> nn.Parameter:
        """Replace the stacked parameter of a class and a role, and return it."""
        stack = nn.Parameter(weights, trains)
        self.register_parameter(f"{role}_{group.hidden}", stack)
        return stack

    @torch.no_grad()
    def materialise(self) -> None:
        """Give memory on the default device, filled with zeros, to weights that have none."""
        for group, role, stack in self.stacks():
            if stack.is_meta:
                zeros = torch.zeros_like(stack, device=torch.get_default_device())
                self.set_stack(group, role, zeros, stack.requires_grad)

    @torch.no_grad()
    def part(self, held: Sequence[int]) -> ExpertBank:
        """Return a bank of some of these experts, with copies of their weights."""
        with without_memory():
            bank = self.with_experts(self.sizes, self.ids, held)
        for group, role, _ in list(bank.stacks()):
            whole = self.get_parameter(f"{role}_{group.hidden}")
            (own_group,) = (each for each in self.classes if each.hidden == group.hidden)
            indices = [own_group.rows.index(expert) for expert in group.rows]
            weights = whole[torch.tensor(indices, device=whole.device)].clone()
            bank.set_stack(group, role, weights, whole.requires_grad)
        return bank

    def with_experts(
        self, sizes: Sequence[int], ids: Sequence[int], held: Sequence[int] | None = None
    ) -> ExpertBank:
        """Return a bank of other experts that computes as this one does. Its weights have no values yet."""
        bank = ExpertBank(self.width, sizes, self.form, held, ids)
        bank.kernel = self.kernel
        bank.fp8 = self.fp8
        bank.recomputes = self.recomputes
        bank.slot_E = bank.slot_E.to(self.slot_E.device)
        return bank.train(self.training)

    @torch.no_grad()
    def adapt(self, adapters: Adapters) -> None:
        """Freeze the experts, and add adapters of zeros: in fp32 where the weights have a shorter type."""
        self.form = replace(self.form, adapters=adapters)
        self.requires_grad_(False)
        for group in self.classes:
            frozen = self.get_parameter(f"up_{group.hidden}")
            dtype = torch.promote_types(frozen.dtype, torch.float32)
            for role in adapters.roles:
                shape = (len(group.rows), *self.form.shape(role, self.width, group.hidden))
                self.set_stack(group, role, torch.zeros(shape, dtype=dtype, device=frozen.device))

    @torch.no_grad()
    def pack(self, packing: Packing) -> None:
        """Freeze the experts, and keep their matrices in 4 or 8 bits."""
        self.requires_grad_(False)
        self.form = replace(self.form, packing=packing)
        for group, role, stack in self.stacks():
            form = self.form.packed(role, self.width, group.hidden)
            if form is not None:
                self.set_stack(group, role, _packed_rows(stack, form), trains=False)

    @torch.no_grad()
    def unpack(self, dtype: torch.dtype) -> None:
        """Keep packed matrices as numbers of a type again."""
        for group, role, stack in self.stacks():
            form = self.form.packed(role, self.width, group.hidden)
            if form is not None:
                whole = torch.stack([form.unpack(row, dtype).t() for row in stack.unbind()])
                self.set_stack(group, role, whole, trains=False)
        self.form = replace(self.form, packing=None)

    @torch.no_grad()
    def merge_adapters(self) -> None:
        """Add the adapters to the matrices, and remove them. Packed matrices are unpacked first."""
        adapters = self.form.adapters
        if self.form.packing is not None:
            self.unpack(torch.float32)
        if adapters is None:
            return
        for group in self.classes:
            for matrix in adapters.matrices:
                stack = self.get_parameter(f"{matrix}_{group.hidden}")
                first, second = (
                    self.get_parameter(f"{matrix}_lora_{factor}_{group.hidden}") for factor in "ab"
                )
                # One expert after another: all changes at once would take as much memory as the weights.
                for weight, a, b in zip(stack, first, second, strict=True):
                    weight.copy_(adapters.merged(weight, a, b))
            for role in adapters.roles:
                delattr(self, f"{role}_{group.hidden}")
        self.form = replace(self.form, adapters=None)

    def forward(
        self, x: Tensor, counts_L: Tensor, weights_R: Tensor, row_map: RowMap | None = None
    ) -> Tensor:
        """Return the experts' outputs for rows that are sorted by slot, each times its weight.

        With a ``row_map``, ``x`` are tokens, and the outputs of each token's rows are summed. With
        ``recomputes`` only the arguments are kept for the backward pass."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._forward, x, counts_L, weights_R, row_map, use_reentrant=False)
        return self._forward(x, counts_L, weights_R, row_map)

    def _forward(self, x: Tensor, counts_L: Tensor, weights_R: Tensor, row_map: RowMap | None) -> Tensor:
        # Cast explicitly, with autocast off, so that all kernels compute in the same type.
        x = x.to(computing_dtype(x))
        with without_autocast(x):
            if row_map is None:
                return self._compute_rows(x, counts_L, weights_R)
            # Fused: one function copies tokens to rows, computes them, and sums the rows of each token.
            if self.fuses(x, len(row_map.token_R)):
                matrices = [self._matrices(group, x.dtype) for group in self.classes]
                return experts_fused(x, matrices, counts_L, weights_R, row_map, self.fp8)
            self._check_unfused(x, len(row_map.token_R))
            rows_RD = copy_rows(x, row_map)
            return sum_rows(self._compute_rows(rows_RD, counts_L, weights_R), row_map)

    def waits_for_counts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the host waits for the rows of each expert before it computes them."""
        if self._can_fuse(device, dtype):
            return False
        is_packed = self.form.packing is not None
        return is_packed or len(self.classes) > 1 or "loop" in self._kernels(device, dtype)

    def fuses(self, x_TD: Tensor, num_rows: int) -> bool:
        """Whether ``experts_fused`` computes these tokens, copies and sums included.

        It skips the rows after those of the last expert, so that ``num_rows`` may be a bound."""
        dtype = computing_dtype(x_TD)
        if isinstance(x_TD, FakeTensor) or not num_rows or not self._can_fuse(x_TD.device, dtype):
            return False
        # In fp8 only the fused function works, whatever memory it wastes.
        return self.fp8 or self._unused_bytes(num_rows, dtype.itemsize) <= _MAX_UNUSED_BYTES

    def fp8_obstacle(self) -> str | None:
        """Return why these experts cannot compute in fp8 on any device; None if they can."""
        if self.kind != "swiglu" or not self.form.is_plain:
            parts = [self.kind, *(["with biases"] if self.form.bias else [])]
            parts += ["with an activation of its own"] if self.form.activation is not None else []
            parts += ["with adapters"] if self.form.adapters is not None else []
            parts += [f"in {self.form.packing}"] if self.form.packing is not None else []
            return f"experts of the form {' '.join(parts)}; plain swiglu was needed"
        sizes = sorted({self.width, *self.sizes})
        if any(size % SIZE_MULTIPLE for size in sizes):
            found = ", ".join(map(str, sorted(set(self.sizes))))
            return f"experts of {self.width} × {found}; multiples of {SIZE_MULTIPLE} were needed"
        return None

    def _check_unfused(self, x_TD: Tensor, num_rows: int) -> None:
        """Raise ValueError where fp8 was requested and these experts would compute in another type.

        A pass outside of autocast and without gradients is a measurement, which may use any type."""
        if not self.fp8 or not num_rows or isinstance(x_TD, FakeTensor):
            return
        if x_TD.dtype != torch.bfloat16 and not torch.is_grad_enabled():
            return
        raise ValueError(
            f"experts of {self.width} × {sorted(set(self.sizes))} in {x_TD.dtype} on {x_TD.device.type} "
            f"with the {self.kernel} kernel cannot compute in fp8: it needs plain swiglu experts, tokens "
            f"in bf16, sizes in multiples of {SIZE_MULTIPLE}, and a GPU of compute capability 9 or 10"
        )

    def _can_fuse(self, device: torch.device, dtype: torch.dtype) -> bool:
        if self.kind != "swiglu" or not self.form.is_plain:
            return False
        sizes = [group.hidden for group in self.classes]
        # Without the number of experts, which the fused function does not limit as torch's product does.
        if {choose_kernel(self.kernel, device, dtype, self.width, size) for size in sizes} != {"grouped"}:
            return False
        return fused_experts.works(device, dtype, self.width, sizes, self.fp8)

    def _kernels(self, device: torch.device, dtype: torch.dtype) -> set[Kernel]:
        """Return the kernels of all size classes."""
        return {self._kernel(group, device, dtype) for group in self.classes}

    def _kernel(self, group: SizeClass, device: torch.device, dtype: torch.dtype) -> Kernel:
        return choose_kernel(self.kernel, device, dtype, self.width, group.hidden, len(group.rows))

    def _unused_bytes(self, num_rows: int, itemsize: int) -> int:
        """Return the bytes of the shared buffer beyond the hidden rows, if experts have even shares."""
        hidden = [group.hidden for group in self.classes for _ in group.rows]
        excess = max(hidden) - sum(hidden) / len(hidden)
        return int(2 * excess * num_rows * itemsize)  # a hidden row has a gate and a value

    def _compute_rows(self, rows_RD: Tensor, counts_L: Tensor, weights_R: Tensor) -> Tensor:
        """Compute rows, one size class after another."""
        if not self.classes:
            return rows_RD
        if len(self.classes) == 1:
            return self._compute(self.classes[0], rows_RD, counts_L, weights_R)
        counts_of_class = counts_L.split([len(group.rows) for group in self.classes])
        # Splitting rows by class needs their numbers on the host: one transfer for all classes.
        totals = torch.stack([counts.sum() for counts in counts_of_class])
        sizes = row_counts(totals, rows_RD.shape[0])
        rows_of_class = rows_RD.split(sizes)
        weights_of_class = weights_R.split(sizes)
        pieces = zip(self.classes, rows_of_class, counts_of_class, weights_of_class, strict=True)
        return torch.cat([self._compute(*piece) for piece in pieces])

    def _compute(
        self,
        group: SizeClass,
        rows_RD: Tensor,
        counts_E: Tensor,
        weights_R: Tensor,
    ) -> Tensor:
        """Compute the experts of one size class."""
        dtype = rows_RD.dtype
        kernel = self._kernel(group, rows_RD.device, dtype)
        compiling = torch.compiler.is_compiling()
        # The compiler supports grouped products in bf16 only, and a trace would not count their FLOPs.
        supported = dtype == torch.bfloat16 or not compiling
        grouped = kernel == "grouped" and supported and not isinstance(rows_RD, FakeTensor)
        if not self.form.is_plain:
            weights = {role: self._stack(group, role, dtype) for role in self.form.roles}
            if self.form.adapters is not None:
                weights = self.form.adapters.scaled(weights, size_multiple(dtype) if grouped else 1)
            is_traceable = grouped and self.form.packing is None
            general = experts_general if is_traceable else uncompiled(experts_general)
            return general(rows_RD, weights, counts_E, weights_R, self.form.activate, grouped)
        arguments = (rows_RD, *self._matrices(group, dtype), counts_E, weights_R, self.kind)
        if grouped:
            return experts_grouped(*arguments)
        # Row counts change at every step, and the loop would be compiled anew for each of them.
        return uncompiled(experts_loop)(*arguments)

    def _matrices(self, group: SizeClass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the two matrices of a size class, in the type of the rows."""
        return self._weights(f"up_{group.hidden}", dtype), self._weights(f"down_{group.hidden}", dtype)

    def _stack(self, group: SizeClass, role: str, dtype: torch.dtype) -> Matrices:
        """Return the weights of a size class in the type of the rows, or packed."""
        form = self.form.packed(role, self.width, group.hidden)
        if form is None:
            return self._weights(f"{role}_{group.hidden}", dtype)
        return PackedStack(self.get_parameter(f"{role}_{group.hidden}"), form)

    def _weights(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter in a type: its kept copy, or a copy for this pass."""
        parameter = self.get_parameter(name)
        weights = self._weights_in(name, parameter, dtype)
        if self.gradient_sink is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return weights
        return diverted(parameter, weights, self.gradient_sink)

    def _weights_in(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        copy = self.copies.get(name)
        if copy is None or copy.weights.dtype != dtype or copy.parameter is not parameter:
            return parameter.to(dtype)
        if not torch.compiler.is_compiling():  # compiled code has its copies refreshed before each call
            copy.refresh()
        # Detach the copy of a parameter that was frozen since: the copy would still hand over gradients.
        return copy.weights if parameter.requires_grad else copy.weights.detach()


def _packed_rows(stack: Tensor, form: PackedForm) -> Tensor:
    """Return the packed matrices of a stack."""
    if stack.is_meta or isinstance(stack, FakeTensor):
        return torch.empty((len(stack), form.num_bytes), dtype=torch.uint8, device=stack.device)
    return torch.stack([form.pack(matrix.t()) for matrix in stack.unbind()])


def named_banks(model: nn.Module) -> list[tuple[str, ExpertBank]]:
    """Return the banks of a model with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ExpertBank)]


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return the type that experts compute in: that of autocast where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
