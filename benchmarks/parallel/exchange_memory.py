"""Peak memory and time of one layer's token exchange, forward and backward, by number of hosts.

One host runs the real layer; an exchange in its process takes the place of the others. Each of them
sends back the rows that it gets, and this host has all experts, so that the result is that of a
layer without hosts, and every case sends and receives as many rows. Each token's experts are on
different hosts. On a CPU the peak counts the tensors alive at once, on a GPU the memory that torch
allocated; the layer's weights and input are not counted.

    python -m benchmarks.parallel.exchange_memory [--hosts 2 8 32 128] [--tokens 4096] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.moe.context import MoEContext
from experts.moe.layer import MoELayer
from experts.tokens.exchange import Meter, PendingRows
from experts.types import Routing

WARM_UP = 2
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer and of its batch. Few hidden units: the exchange is measured."""

    tokens: int = 4096
    width: int = 1024
    experts: int = 128
    top_k: int = 2
    hidden: int = 8


@dataclass
class MirrorExchange:
    """The exchange with hosts that send back each row they get."""

    size: int
    rank: int = 0

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:  # noqa: ARG002
        return counts_NC.cpu()

    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> PendingRows:
        assert list(send_counts) == list(receive_counts)
        return PendingRows(rows.clone(), None, Meter())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations allocate, and the most that live at once.

    Memory that an operation frees before it returns is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # The arguments' memory existed before: results that are views of it allocate nothing.
        for tensor in _tensors_in((args, kwargs)):
            self._add(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            self._add(storage, storage.nbytes())
        return result

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Case:
    """A layer of one of several hosts, with its input."""

    layer: MoELayer
    x_TD: Tensor
    routing: Routing

    @classmethod
    def build(cls, hosts: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
        generator = torch.Generator().manual_seed(0)
        layer = MoELayer(shape.width, [shape.hidden] * shape.experts, shape.top_k)
        layer.to(device=device, dtype=dtype)
        layer.context = MoEContext(MirrorExchange(hosts))
        layer.host_E = torch.arange(shape.experts, device=device) % hosts
        x_TD = torch.randn(shape.tokens, shape.width, generator=generator)
        weights_TK = torch.rand(shape.tokens, shape.top_k, generator=generator)
        experts_TK = _experts_on_different_hosts(shape, generator).to(device)
        counts_E = torch.bincount(experts_TK.reshape(-1), minlength=shape.experts)
        zero = torch.zeros((), device=device)
        leaf_TK = weights_TK.to(device).requires_grad_()
        routing = Routing(experts_TK, leaf_TK, counts_E, zero, zero)
        return cls(layer, x_TD.to(device, dtype).requires_grad_(), routing)

    def run(self) -> Tensor:
        """Compute output and gradients, through the exchange."""
        y_TD = self.layer._forward_exchanged(self.x_TD, self.routing)
        y_TD.backward(torch.ones_like(y_TD))
        return y_TD.detach()

    def clear(self) -> None:
        self.layer.zero_grad()
        self.x_TD.grad = None
        self.routing.weights_TK.grad = None


def _experts_on_different_hosts(shape: Shape, generator: torch.Generator) -> Tensor:
    """Draw experts whose ids differ modulo K, and so modulo every number of hosts that K divides."""
    groups = shape.experts // shape.top_k
    drawn_TK = torch.randint(groups, (shape.tokens, shape.top_k), generator=generator)
    return drawn_TK * shape.top_k + torch.arange(shape.top_k)


def peak_bytes(case: Case) -> int:
    """Return the most memory that a forward and backward pass holds at once."""
    case.clear()
    if case.x_TD.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        case.run()
    return live.peak


def median_seconds(case: Case, rounds: int) -> float:
    """Return the median time of a forward and backward pass."""
    seconds = []
    for _ in range(WARM_UP + rounds):
        case.clear()
        _synchronize(case.x_TD)
        start = perf_counter()
        case.run()
        _synchronize(case.x_TD)
        seconds.append(perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, shape: Shape, dtype: torch.dtype) -> list[tuple[object, ...]]:
    """Return a row of the table for each number of hosts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[tuple[object, ...]] = []
    first_peak = 0
    for hosts in arguments.hosts:
        case = Case.build(hosts, shape, dtype, device)
        case.run()
        peak = peak_bytes(case)
        first_peak = first_peak or peak
        milliseconds = 1000 * median_seconds(case, arguments.rounds)
        name = str(dtype).removeprefix("torch.")
        rows.append(
            (name, hosts, f"{peak / MEBIBYTE:.1f}", f"{peak / first_peak:.3f}", f"{milliseconds:.1f}")
        )
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=Shape.tokens)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    shape = Shape(tokens=arguments.tokens, width=arguments.width)
    rows: list[tuple[object, ...]] = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure(arguments, shape, dtype)
    columns = ("type", "hosts", "peak MiB", "of the first", "ms")
    title = header("Memory of one token exchange by number of hosts", arguments)
    sizes = f"{shape.tokens} tokens of width {shape.width}, top-{shape.top_k} of {shape.experts} experts\n\n"
    publish(title + sizes + markdown_table(columns, rows), arguments.out)


if __name__ == "__main__":
    main()
