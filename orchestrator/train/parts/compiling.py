"""torch.compile with a way back: a model that does not compile is trained as it is, and the run says so."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from experts.bank import ExpertBank
from experts.gate import Gate
from orchestrator.config.settings import CompileMode, CompileParts
from orchestrator.errors import UserError

_LOGS: Any = importlib.import_module("torch._logging")
_RECOMPILES = logging.getLogger("torch._dynamo.guards.__recompiles")
_PARTS: dict[str, type[nn.Module]] = {"experts": ExpertBank, "gate": Gate}
_TOLERATED = 8  # recompilations before a run is told that its shapes keep changing


class Compiled:
    """What was compiled, how to undo it, and how often it was compiled again."""

    def __init__(self, model: nn.Module, mode: CompileMode, parts: CompileParts) -> None:
        self.modules = _chosen(model, parts)
        self.recompile_reasons: list[str] = []
        self._told = False
        self._handler = _Listening(self.recompile_reasons.append)
        _LOGS.set_logs(recompiles=True)
        _RECOMPILES.propagate = False  # or torch prints them on the screen
        _RECOMPILES.addHandler(self._handler)
        for module in self.modules:
            handle: Any = module
            handle._compiled_call_impl = torch.compile(
                _call_of(module), mode=None if mode == "default" else mode
            )

    def undo(self) -> None:
        """Back to the plain modules, as if nothing had been compiled."""
        for module in self.modules:
            handle: Any = module
            handle._compiled_call_impl = None
        torch._dynamo.reset()
        self.close()

    def close(self) -> None:
        _RECOMPILES.removeHandler(self._handler)
        _RECOMPILES.propagate = True
        _LOGS.set_logs()

    def recompile_warning(self) -> str | None:
        """Once, when the same code was compiled over and over: how often, and the last reason."""
        if self._told or len(self.recompile_reasons) < _TOLERATED:
            return None
        self._told = True
        return f"compiled again {len(self.recompile_reasons)} times because shapes or values keep changing; the last reason: {self.recompile_reasons[-1]}"


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """The module's call as a function of ours: ``Module.compile`` passes over modules that torch itself defines, an
    ``nn.Sequential`` for one, without a word."""

    def call(*arguments: Any, **named: Any) -> Any:
        return module._call_impl(*arguments, **named)

    return call


def _chosen(model: nn.Module, parts: CompileParts) -> list[nn.Module]:
    if parts == "all":
        return [model]
    modules = [module for module in model.modules() if isinstance(module, _PARTS[parts])]
    if not modules:
        raise UserError(f"--compile-parts {parts}: the model has no {parts}; use --compile-parts all")
    return modules


class _Listening(logging.Handler):
    """Catches torch's lines about recompilation; they are not for the screen."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling function" in text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            self._heard(" ".join([lines[0], lines[-1]])[:300])


def is_compile_error(error: BaseException) -> bool:
    """Whether an exception came out of the compiler rather than out of the model."""
    if "CUDAGraphs" in str(error):  # memory of a recorded graph that a later replay has overwritten
        return True
    modules = {type(cause).__module__ for cause in _causes(error)}
    return any(
        name.startswith(("torch._dynamo", "torch._inductor", "triton", "torch.fx")) for name in modules
    )


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following
    return chain
