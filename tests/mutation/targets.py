"""The modules of the numeric core, and the test files that must notice a change in each.

The tests of a module are its mirror, ``tests/.../test_<module>*.py``, and the files listed for it
below: tests of whole properties that cut across modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TARGETS = (
    "experts/moe/gate.py",
    "experts/tokens/dispatch.py",
    "experts/moe/bank.py",
    "experts/moe/layer.py",
    "experts/moe/token_exchange.py",
    "experts/tokens/destinations.py",
    "experts/moe/capacity.py",
    "experts/tokens/bounds.py",
    "experts/tokens/received_rows.py",
    "experts/tokens/exchange.py",
    "experts/tokens/transfer.py",
    "experts/balance.py",
    "experts/placement/*.py",
    "orchestrator/train/stepper.py",
    "orchestrator/train/step/out_of_memory.py",
    "orchestrator/train/step/update.py",
    "orchestrator/train/step/totals.py",
    "orchestrator/train/data/steps.py",
    "orchestrator/train/data/stream.py",
    "orchestrator/train/data/indexed.py",
    "orchestrator/train/data/opening.py",
    "orchestrator/train/device/batches.py",
    "orchestrator/train/optim/gradient_norm.py",
    "orchestrator/train/optim/optimizer.py",
    "orchestrator/train/device/precision.py",
    "orchestrator/train/device/clock.py",
    "orchestrator/train/strategies/*.py",
    "orchestrator/train/checkpoint/state.py",
    "orchestrator/train/checkpoint/capture.py",
    "orchestrator/train/checkpoint/restore.py",
    "orchestrator/plan/batching.py",
    "orchestrator/plan/estimate.py",
    "orchestrator/plan/schedule.py",
    "orchestrator/plan/workers.py",
    "orchestrator/plan/cost/*.py",
    "orchestrator/runtime/recovery.py",
    "orchestrator/runtime/failures.py",
    "orchestrator/runtime/expert_parallel/states.py",
)

_SILENT_ERRORS = "test_silent_errors.py"
_STEP_FP16 = "test_stepper_fp16.py"

MORE_TESTS: dict[str, tuple[str, ...]] = {
    "experts/moe/gate.py": ("moe/test_layer.py", _SILENT_ERRORS),
    "experts/tokens/dispatch.py": ("moe/test_layer.py", "moe/test_token_exchange.py"),
    "experts/moe/bank.py": ("moe/test_layer.py", "kernels/test_kernels.py"),
    "experts/moe/layer.py": ("moe/test_token_exchange.py", _SILENT_ERRORS),
    "experts/moe/token_exchange.py": (_SILENT_ERRORS,),
    "experts/tokens/bounds.py": ("test_layer_on_hosts.py",),
    "experts/tokens/exchange.py": ("test_layer_on_hosts.py",),
    "experts/tokens/transfer.py": ("experts/tokens/test_exchange.py", "test_layer_on_hosts.py"),
    "experts/balance.py": ("test_gate.py", _SILENT_ERRORS),
    "experts/placement/problem.py": ("experts/placement/test_placement.py", "placement/test_search.py"),
    "experts/placement/search.py": ("placement/test_longest_first.py", "placement/test_placement.py"),
    "orchestrator/train/stepper.py": (_SILENT_ERRORS,),
    "orchestrator/train/step/out_of_memory.py": ("test_stepper.py", _SILENT_ERRORS),
    "orchestrator/train/step/totals.py": ("test_stepper.py",),
    "orchestrator/train/step/update.py": ("test_stepper.py", _SILENT_ERRORS, _STEP_FP16),
    "orchestrator/train/data/steps.py": ("data/test_loading.py",),
    "orchestrator/train/data/indexed.py": ("data/test_loading.py",),
    "orchestrator/train/data/opening.py": ("test_trainer_streams.py",),
    "orchestrator/train/device/batches.py": ("device/test_device_copies.py",),
    "orchestrator/train/device/clock.py": ("device/test_timing.py",),
    "orchestrator/train/device/precision.py": ("test_stepper.py", _STEP_FP16),
    "orchestrator/train/strategies/base.py": ("strategies/test_ddp.py", _SILENT_ERRORS),
    "orchestrator/train/strategies/buckets.py": ("strategies/test_ddp.py",),
    "orchestrator/train/strategies/buffers.py": ("strategies/test_ddp.py",),
    "orchestrator/train/strategies/building.py": ("worker/test_build.py",),
    "orchestrator/train/strategies/ddp.py": (_SILENT_ERRORS,),
    "orchestrator/train/strategies/expert_parallel.py": (_SILENT_ERRORS,),
    "orchestrator/train/strategies/reproducible_shards.py": ("test_reproducible_shards.py",),
    "orchestrator/train/strategies/fsdp.py": (_STEP_FP16,),
    "orchestrator/train/strategies/host_mesh.py": (
        "strategies/test_expert_parallel.py",
        "test_reproducible_shards.py",
    ),
    "orchestrator/train/strategies/placement_file.py": ("strategies/test_placement.py",),
    "orchestrator/train/checkpoint/state.py": ("checkpoint/test_snapshots.py", "test_snapshot_resume.py"),
    "orchestrator/train/checkpoint/capture.py": ("test_capture.py", "test_snapshot_resume.py"),
    "orchestrator/train/checkpoint/restore.py": ("checkpoint/test_snapshots.py", "test_snapshot_resume.py"),
    "orchestrator/plan/schedule.py": ("test_planning.py",),
    "orchestrator/plan/cost/devices.py": ("cost/test_scaling.py",),
    "orchestrator/plan/cost/interpolate.py": ("cost/test_model.py",),
    "orchestrator/plan/cost/machine.py": ("cost/test_model.py", "test_traffic.py"),
    "orchestrator/plan/cost/ops.py": ("cost/test_model.py", "test_step_trace.py"),
    "orchestrator/runtime/expert_parallel/states.py": ("test_run_without_ray.py", "test_run_segments.py"),
}
"""More tests of a module, by the end of their paths: each names one file below ``tests/``."""


def target_files(root: Path, patterns: Iterable[str]) -> list[str]:
    """Return the modules that match the patterns, as paths from the root; empty files are left out."""
    files = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    names = [path.relative_to(root).as_posix() for path in files if path.read_text(encoding="utf-8").strip()]
    return list(dict.fromkeys(names))


def mirrored_tests(root: Path, target: str) -> list[str]:
    """Return the test files of a module, its mirror first."""
    path = Path(target)
    below = path.parent.relative_to("orchestrator") if path.parts[0] == "orchestrator" else path.parent
    folder = root / "tests" / below
    mirror = [folder / f"test_{path.stem}.py", *sorted(folder.glob(f"test_{path.stem}_*.py"))]
    own = [file for file in mirror if file.exists() and not _mirrors_another(root, path, file)]
    names = [file.relative_to(root).as_posix() for file in own]
    more = [_find_test(root, end) for end in MORE_TESTS.get(target, ())]
    return list(dict.fromkeys([*names, *more]))


def _find_test(root: Path, end: str) -> str:
    """Return the one test file whose path ends so."""
    found = sorted((root / "tests").rglob(end))
    if len(found) != 1:
        raise ValueError(f"{end} in tests/mutation/targets.py names {len(found)} files; it must name one")
    return found[0].relative_to(root).as_posix()


def _mirrors_another(root: Path, target: Path, test: Path) -> bool:
    """Report whether a test of ``placement_file`` was taken for one of ``placement``."""
    module = test.name.removeprefix("test_")
    return module != target.name and (root / target.parent / module).exists()
