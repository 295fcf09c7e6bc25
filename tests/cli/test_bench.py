"""``orchestrator bench`` measures a task: time of each phase, speed, memory and loss, by precision."""

from __future__ import annotations

import json

import pytest

from harness.runs.small_flags import CPU, SMALL
from tests.cli.helpers import Call


@pytest.mark.parametrize(
    ("flags", "precisions"), [((), ["fp32"]), (("--precisions",), ["fp32", "bf16", "fp16"])]
)
def test_a_task_is_measured(call: Call, flags: tuple[str, ...], precisions: list[str]) -> None:
    answer = call("bench", *SMALL, *CPU, "--batch-size", "4", "--iterations", "3", "--json", *flags)
    assert answer.code == 0, answer
    rows = json.loads(answer.out)
    assert [(row["precision"], row["iterations"], row["batch_size"]) for row in rows] == [
        (precision, 3, 4) for precision in precisions
    ]
    for row in rows:
        median = row["median"]
        assert min(median["forward"], median["backward"], median["optimizer"]) > 0
        assert median["total"] > max(median["forward"], median["backward"])
        assert row["samples_per_second"] == pytest.approx(4 / median["total"])
        assert row["peak_memory_bytes"] > 0
        # From about the logarithm of 256 tokens on; the rounding of short types is far smaller.
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=0.05)
