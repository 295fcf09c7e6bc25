"""The ranks that other tests use: they return results, fail by name, and leave no process
behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.hosts.ranks import RanksFailed, gloo, run_ranks, start_ranks


def sum_of_ranks(
    rank: int,
    size: int,
    store_path: str,
    factor: float,
) -> tuple[int, float, torch.Tensor]:
    with gloo(rank, size, store_path):
        value = torch.tensor(float(rank + 1)) * factor
        dist.all_reduce(value)
        return torch.get_num_threads(), value.item(), torch.full((2,), float(rank))


def fail_on_rank_1(rank: int, size: int, store_path: str) -> None:
    with gloo(rank, size, store_path):
        if rank == 1:
            raise ValueError("no such batch")
        dist.all_reduce(torch.ones(1))


def hang_on_rank_2(rank: int, size: int, store_path: str) -> int:
    if rank == 2:
        sleep_forever()
    return rank


def variable(rank: int, size: int, store_path: str) -> str | None:
    return os.environ.get("ORCHESTRATOR_TEST_VARIABLE")


def sleep_forever() -> None:
    time.sleep(600)


def exit_on_rank_0(rank: int, size: int, store_path: str) -> None:
    if rank == 0:
        os._exit(7)


def lose_rank_1(rank: int, size: int, store_path: str, folder: str) -> str:
    """The error of a collective with a rank that was killed."""
    with gloo(rank, size, store_path):
        dist.all_reduce(torch.ones(1))
        Path(folder, str(rank)).touch()
        try:
            dist.all_reduce(torch.ones(1)) if rank != 1 else sleep_forever()
        except RuntimeError as error:
            return str(error)
        return "no error"


def is_alive(pid: int | None) -> bool:
    """Whether a process runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_sum_and_return_in_order() -> None:
    results = run_ranks(sum_of_ranks, 3, 2.0)
    assert [value for _, value, _ in results] == [12.0] * 3
    assert {threads for threads, _, _ in results} == {1}
    assert [tensor.tolist() for _, _, tensor in results] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_second_start_is_quick() -> None:
    run_ranks(hang_on_rank_2, 1)
    start = time.monotonic()
    run_ranks(hang_on_rank_2, 2)
    assert time.monotonic() - start < 3.0


def test_the_failed_rank_comes_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_rank_1, 3)
    assert str(caught.value).startswith("--- rank 1: Traceback")
    assert "ValueError: no such batch" in caught.value.failures[1]
    assert next(iter(caught.value.failures)) == 1


def test_a_hung_rank_is_shown_with_its_stack_and_ended() -> None:
    with start_ranks(hang_on_rank_2, 3) as ranks:
        with pytest.raises(RanksFailed, match=r"rank 2: did not answer within 1 s") as caught:
            ranks.results(timeout=1.0)
        assert list(caught.value.failures) == [2]
        assert "sleep_forever" in str(caught.value)
    assert not any(is_alive(process.pid) for process in ranks.processes)


def test_a_rank_that_ends_without_a_result_fails() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: ended without a result, exit code 7"):
        run_ranks(exit_on_rank_0, 2)


def test_a_rank_can_be_killed_on_purpose(tmp_path: Path) -> None:
    with start_ranks(lose_rank_1, 3, str(tmp_path)) as ranks:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        ranks.kill(1)
        first, killed, third = ranks.results(30.0)
    assert killed is None
    for error in (first, third):
        assert "peer" in error


def test_a_frozen_rank_leaves_no_process() -> None:
    with start_ranks(hang_on_rank_2, 3) as ranks:
        ranks.kill(2, signal.SIGSTOP)
        assert ranks.results(30.0, ranks=(0, 1)) == [0, 1]
        assert is_alive(ranks.processes[2].pid)
    assert not any(is_alive(process.pid) for process in ranks.processes)


@pytest.mark.extended
def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "from harness.hosts.ranks import start_ranks\n"
        "from tests.harness.hosts.test_ranks import hang_on_rank_2\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    with start_ranks(hang_on_rank_2, 3) as ranks:\n"
        "        print(ranks.processes[2].pid, flush=True)\n"
        "        time.sleep(600)\n"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        assert is_alive(rank)
        time.sleep(0.3)  # until the rank polls its pipe
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(rank)


def test_a_rank_has_the_environment_of_the_test_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(variable, 1) == [None]
    monkeypatch.setenv("ORCHESTRATOR_TEST_VARIABLE", "given")
    assert run_ranks(variable, 1) == ["given"]
    monkeypatch.delenv("ORCHESTRATOR_TEST_VARIABLE")
    assert run_ranks(variable, 1) == [None]
