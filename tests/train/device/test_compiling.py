"""Tests of compilation: it can be undone, and recompilations are reported but not printed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from experts.moe.layer import MoELayer
from orchestrator.errors import UserError
from orchestrator.train.device.compiling import Compiled, is_compile_error, report_compilation
from orchestrator.train.group.heartbeat import Heartbeat, Phase


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo without its code generator, which is slow."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend="eager", dynamic=False))
    torch._dynamo.reset()


def test_recompilations_are_counted_and_named_but_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    compiled = Compiled(model, "default", "all")
    assert compiled.recompile_warning() is None
    for batch in range(1, 12):
        model(torch.zeros(batch, 4))
    warning = compiled.recompile_warning()
    assert warning is not None
    assert "size mismatch at index 0" in warning
    assert compiled.recompile_warning() is None, "the warning comes once"
    compiled.undo()
    assert "Recompiling" not in "".join(capfd.readouterr())


def test_a_model_is_compiled_whatever_its_process_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch stops at eight forms of one function, and keeps those of models that are gone."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    real = importlib.import_module("torch._dynamo").optimize
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(counting, dynamic=False)(call))
    for width in range(1, 12):
        model = nn.Sequential(nn.Linear(width, 3))
        compiled = Compiled(model, "default", "all")
        model(torch.ones(2, width))
        compiled.close()
        assert len(graphs) == width


def test_undo_restores_the_plain_model() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    names = set(model.state_dict())
    before = model(torch.ones(2, 4))
    compiled = Compiled(model, "default", "all")
    assert set(model.state_dict()) == names
    compiled.undo()
    assert torch.equal(model(torch.ones(2, 4)), before)


def test_settings_of_torch_last_as_long_as_the_compiled_model() -> None:
    settings: Any = importlib.import_module("torch._functorch.config")
    before = settings.ban_recompute_used_far_apart
    compiled = Compiled(nn.Sequential(nn.Linear(4, 3)), "default", "all")
    assert before is True
    assert settings.ban_recompute_used_far_apart is False
    compiled.close()
    assert settings.ban_recompute_used_far_apart is True


def test_settings_of_torch_return_after_a_model_that_was_never_closed() -> None:
    settings: Any = importlib.import_module("torch._functorch.config")
    model = nn.Sequential(nn.Linear(4, 3))
    left_open = Compiled(model, "default", "all")
    Compiled(model, "default", "all").close()
    assert settings.ban_recompute_used_far_apart is True
    settings.ban_recompute_used_far_apart = False  # by the user
    try:
        left_open.close()
        assert settings.ban_recompute_used_far_apart is False
    finally:
        settings.ban_recompute_used_far_apart = True


def test_only_the_chosen_parts_are_compiled() -> None:
    layer = MoELayer(8, [4, 4], 1)
    of_gate = Compiled(layer, "default", "gate")
    of_gate.close()
    of_experts = Compiled(layer, "default", "experts")
    of_experts.close()
    assert (of_gate.modules, of_experts.modules) == ([layer.gate], [layer.bank])
    with pytest.raises(UserError, match="has no experts"):
        Compiled(nn.Linear(2, 2), "default", "experts")


def test_errors_of_the_compiler_differ_from_errors_of_the_model() -> None:
    def broken_backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("code generator")

    compiled = torch._dynamo.optimize(broken_backend)(lambda x: x + 1)
    with pytest.raises(Exception) as caught:
        compiled(torch.zeros(1))
    assert is_compile_error(caught.value)
    assert not is_compile_error(ValueError("of the model"))


# --- compilations in the heartbeat


def compile_new(model: nn.Module) -> None:
    torch.compile(model.forward)(torch.zeros(2, 4))


def phases_of(heartbeat: Heartbeat, compile_it: Callable[[], None]) -> list[str]:
    """Return the phases that a heartbeat enters while something is compiled."""
    phases: list[str] = []
    enter_phase = heartbeat.enter_phase

    def record(phase: Phase, step: int | None = None) -> None:
        phases.append(phase)
        enter_phase(phase, step)

    heartbeat.enter_phase = record
    compile_it()
    return phases


def test_a_compilation_shows_in_the_heartbeat() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter_phase("step", 3)
    with report_compilation(heartbeat):
        assert phases_of(heartbeat, lambda: compile_new(nn.Linear(4, 3))) == ["compile", "step"]
    assert phases_of(heartbeat, lambda: compile_new(nn.Linear(4, 5))) == [], "no one is told any more"


def test_compilations_still_show_after_a_model_was_uncompiled() -> None:
    heartbeat = Heartbeat()
    model = nn.Sequential(nn.Linear(4, 3))
    with report_compilation(heartbeat):
        Compiled(model, "default", "all").undo()
        assert "compile" in phases_of(heartbeat, lambda: compile_new(nn.Linear(4, 6)))


def test_a_reset_of_the_compiler_in_the_users_code_does_no_harm() -> None:
    with report_compilation(Heartbeat()):
        torch._dynamo.reset()
