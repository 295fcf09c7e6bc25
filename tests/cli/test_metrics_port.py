"""Tests of ``--metrics-port`` with real runs: scraped while they train, gone when they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from harness.hosts.cluster import RayCluster
from harness.runs.cli_runs import command, finish_run, start_run
from harness.runs.records import by_step
from harness.runs.small_flags import CPU
from orchestrator.live.watch.watching import Watch
from orchestrator.record.files.reading import read_events
from tests.cli.helpers import Call, check_answer

ENDLESS = ("--max-steps", "1000000", "--epochs", "1000000", "--metrics-port", "0", *CPU)
WAIT_S = 120.0


def start_process(run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run_dir, *ENDLESS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
        start_new_session=True,
    )


def endpoint(process: subprocess.Popen[str]) -> str:
    """Return the address that the screen shows."""
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        match = re.fullmatch(r"metrics: (http://127\.0\.0\.1:\d+/metrics)\n", line)
        if match:
            return match[1]
    pytest.fail(f"no address of metrics in:\n{''.join(shown)}")


def scrape(url: str) -> dict[str, float]:
    """Return the samples without labels of their own, by name."""
    with urlopen(url, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.name.removeprefix("orchestrator_"): sample.value
            for family in families
            for sample in family.samples
            if sample.labels == {"run": "run1"}
        }


def watch_and_scrape(process: subprocess.Popen[str], run_dir: Path, workers: int) -> None:
    """Scrape until steps have passed, compare with the record, and interrupt the run."""
    try:
        url = endpoint(process)
        deadline = time.monotonic() + WAIT_S
        found = scrape(url)
        while found.get("step", 0) < 4:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
            found = scrape(url)
        assert found["running"] == 1
        assert found["workers"] == workers
        assert found["samples_per_second"] > 0
        losses = {event["step"]: event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))}
        assert found["loss"] == losses[int(found["step"])]
        view = Watch(run_dir, Console(width=80))
        view.read()
        assert view.lines()[0].plain.split() == ["run1", "running"]
        process.send_signal(signal.SIGINT)
        finish_run(process, code=130)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with pytest.raises(URLError):
        scrape(url)


def test_a_run_in_one_process_is_scraped(tmp_path: Path) -> None:
    run_dir = tmp_path / "run1"
    watch_and_scrape(start_process(run_dir), run_dir, workers=1)


@pytest.mark.extended
@pytest.mark.ray
def test_a_run_on_hosts_is_scraped(tmp_path: Path, shared_cluster: RayCluster) -> None:
    run_dir = tmp_path / "run1"
    hosts = ("--workers", "2", "--parallel-strategy", "expert_parallel")
    watch_and_scrape(start_run(shared_cluster, run_dir, *ENDLESS, *hosts), run_dir, workers=2)


def test_a_port_that_cannot_be_used_is_refused_before_the_run(call: Call, tmp_path: Path) -> None:
    answer = call("train", "--metrics-port", "0", "--metrics-address", "203.0.113.7", *CPU)
    check_answer(answer, "--metrics-port 0: cannot listen on 203.0.113.7:0")
    assert not (tmp_path / "results").exists()
    check_answer(call("train", "--metrics-port", "99999"), "--metrics-port is 99999")
