"""``torch.compile`` that can be undone: a model that does not compile is trained uncompiled."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from experts.moe.bank import ExpertBank
from experts.moe.gate import Gate
from orchestrator.config.settings import CompileMode, CompileParts
from orchestrator.errors import UserError
from orchestrator.train.group.heartbeat import Heartbeat, Phase
from orchestrator.train.optim.weight_copies import WeightCopies

_TORCH_LOGGING: Any = importlib.import_module("torch._logging")
_AUTOGRAD_SETTINGS: Any = importlib.import_module("torch._functorch.config")
_RECOMPUTATION = {"ban_recompute_used_far_apart": False, "ban_recompute_materialized_backward": False}
"""Settings by which compiled code recomputes more sums and norms in the backward pass instead of keeping
them: 1.3 of 43.2 GiB of a model with 2.5 billion parameters on an H200, for 0.3% of its time."""
_TORCH_SETTINGS: dict[str, bool] = {}
"""Torch's own values, while ours are used. All compiled models share them: if one was never closed, because
the state of its run could not be restored, the next must not save our values as torch's."""
_RECOMPILES = logging.getLogger("torch._dynamo.guards.__recompiles")
_PARTS: dict[str, type[nn.Module]] = {"experts": ExpertBank, "gate": Gate}
_WARN_AFTER = 8  # recompilations before the run warns that its shapes keep changing


class Compiled:
    """The compiled modules of a model, and the reasons for which they were compiled again."""

    def __init__(
        self,
        model: nn.Module,
        mode: CompileMode,
        parts: CompileParts,
        copies: WeightCopies | None = None,
        by_shape: bool = False,
    ) -> None:
        """``by_shape`` compiles code for each shape: else that for one may follow the shapes seen before."""
        # Torch keeps the code of all runs of a process together. Past its limit it would leave the modules of
        # a later run uncompiled, and shapes seen in an earlier run would decide on the code of this one.
        _forget_compiled_code()
        self._dynamic = False if by_shape else None
        self.modules = _modules_to_compile(model, parts)
        self._copies = copies
        self._mode = mode
        self._parts: CompileParts = parts
        self.recompile_reasons: list[str] = []
        self._warned = False
        self._handler = _RecompileHandler(self.recompile_reasons.append)
        _TORCH_LOGGING.set_logs(recompiles=True)
        _RECOMPILES.propagate = False  # otherwise torch prints them on the screen
        _RECOMPILES.addHandler(self._handler)
        _recompute_more()
        for module in self.modules:
            self._compile(module)

    def _compile(self, module: nn.Module) -> None:
        handle: Any = module
        mode = None if self._mode == "default" else self._mode
        compiled = torch.compile(_call_of(module), mode=mode, dynamic=self._dynamic)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._copies is not None:
                self._copies.refresh()  # compiled code cannot find out that weights were written
            return compiled(*arguments, **keywords)

        handle._compiled_call_impl = call

    def experts_changed(self, model: nn.Module) -> None:
        """Compile the modules that have replaced others."""
        before = set(self.modules)
        self.modules = _modules_to_compile(model, self._parts)
        for module in self.modules:
            if module not in before:
                self._compile(module)

    def undo(self) -> None:
        """Return to the plain modules, as if nothing had been compiled."""
        for module in self.modules:
            handle: Any = module
            handle._compiled_call_impl = None
        _forget_compiled_code()
        self.close()

    def close(self) -> None:
        """Stop listening to torch's recompilation log, and return to torch's settings."""
        _restore_settings()
        _RECOMPILES.removeHandler(self._handler)
        _RECOMPILES.propagate = True
        _TORCH_LOGGING.set_logs()

    def recompile_warning(self) -> str | None:
        """Return a warning, once, when code was compiled over and over; it names the last reason."""
        if self._warned or len(self.recompile_reasons) < _WARN_AFTER:
            return None
        self._warned = True
        return (
            f"compiled again {len(self.recompile_reasons)} times because shapes or values keep changing; "
            f"the last reason: {self.recompile_reasons[-1]}"
        )


def _recompute_more() -> None:
    for name, value in _RECOMPUTATION.items():
        _TORCH_SETTINGS.setdefault(name, getattr(_AUTOGRAD_SETTINGS, name))
        setattr(_AUTOGRAD_SETTINGS, name, value)


def _restore_settings() -> None:
    for name, value in _TORCH_SETTINGS.items():
        setattr(_AUTOGRAD_SETTINGS, name, value)
    _TORCH_SETTINGS.clear()


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the module's call as a function of this file.

    ``Module.compile`` silently skips modules that torch itself defines, such as ``nn.Sequential``.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return module._call_impl(*arguments, **keywords)

    return call


def _modules_to_compile(model: nn.Module, parts: CompileParts) -> list[nn.Module]:
    if parts == "all":
        return [model]
    modules = [module for module in model.modules() if isinstance(module, _PARTS[parts])]
    if not modules:
        raise UserError(f"--compile-parts {parts}: the model has no {parts}; use --compile-parts all")
    return modules


class _RecompileHandler(logging.Handler):
    """Collects torch's messages about recompilations."""

    def __init__(self, on_recompile: Callable[[str], None]) -> None:
        super().__init__()
        self._on_recompile = on_recompile

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling function" in text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            self._on_recompile(" ".join([lines[0], lines[-1]])[:300])


@contextmanager
def report_compilation(heartbeat: Heartbeat) -> Iterator[None]:
    """Show in the heartbeat when torch compiles, whichever code asked for it.

    A compilation may come late in a run, with a new shape, and take minutes without any other sign of
    progress."""
    # Importing it takes a second, which a process without a supervisor saves.
    from torch._dynamo.callback import callback_handler

    phases: list[Phase] = []

    def begin(_: Any) -> None:
        phases.append(heartbeat.phase)
        heartbeat.enter_phase("compile")

    def end(_: Any) -> None:
        heartbeat.enter_phase(phases.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # The user's code may have reset torch's compiler, which drops the callbacks.
        with suppress(ValueError):
            callback_handler.remove_start_callback(begin)
        with suppress(ValueError):
            callback_handler.remove_end_callback(end)


def _forget_compiled_code() -> None:
    """Reset the compiler, but for the callbacks of compilations."""
    from torch._dynamo.callback import callback_handler

    start_callbacks = list(callback_handler.start_callbacks)
    end_callbacks = list(callback_handler.end_callbacks)
    torch._dynamo.reset()
    callback_handler.start_callbacks[:] = start_callbacks
    callback_handler.end_callbacks[:] = end_callbacks


def is_compile_error(error: BaseException) -> bool:
    """Return whether an exception comes from the compiler rather than from the model."""
    # CUDA graphs: memory of a recorded graph that a later replay has overwritten.
    if "CUDAGraphs" in str(error):
        return True
    modules = {type(cause).__module__ for cause in _causes(error)}
    compiler = ("torch._dynamo", "torch._inductor", "triton", "torch.fx")
    return any(name.startswith(compiler) for name in modules)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and the chain of its causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain
