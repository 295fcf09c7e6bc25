"""The ranks that other tests stand on: they answer, fail by name, and none stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailed, gloo, run_ranks, start_ranks


def summed(rank: int, size: int, store_path: str, factor: float) -> tuple[int, float, torch.Tensor]:
    with gloo(rank, size, store_path):
        value = torch.tensor(float(rank + 1)) * factor
        dist.all_reduce(value)
        return torch.get_num_threads(), value.item(), torch.full((2,), float(rank))


def one_fails(rank: int, size: int, store_path: str) -> None:
    with gloo(rank, size, store_path):
        if rank == 1:
            raise ValueError("no such batch")
        dist.all_reduce(torch.ones(1))


def one_hangs(rank: int, size: int, store_path: str) -> int:
    if rank == 2:
        asleep()
    return rank


def asleep() -> None:
    time.sleep(600)


def one_exits(rank: int, size: int, store_path: str) -> None:
    if rank == 0:
        os._exit(7)


def survives(rank: int, size: int, store_path: str, mark: str) -> str:
    with gloo(rank, size, store_path):
        dist.all_reduce(torch.ones(1))
        Path(f"{mark}{rank}").touch()
        try:
            dist.all_reduce(torch.ones(1)) if rank != 1 else asleep()
        except RuntimeError as error:
            return str(error)
        return "not alone"


def alive(pid: int | None) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_sum_and_return_in_order() -> None:
    results = run_ranks(summed, 3, 2.0)
    assert [value for _, value, _ in results] == [12.0] * 3
    assert {threads for threads, _, _ in results} == {1}
    assert [tensor.tolist() for _, _, tensor in results] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_second_start_is_quick() -> None:
    run_ranks(one_hangs, 1)
    begun = time.monotonic()
    run_ranks(one_hangs, 2)
    assert time.monotonic() - begun < 3.0


def test_the_rank_that_failed_is_named_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_fails, 3)
    assert str(caught.value).startswith("--- rank 1: Traceback")
    assert "ValueError: no such batch" in caught.value.failures[1]
    assert next(iter(caught.value.failures)) == 1


def test_a_hung_rank_is_named_with_its_stack_and_ended() -> None:
    with start_ranks(one_hangs, 3) as ranks:
        with pytest.raises(RanksFailed, match=r"rank 2: did not answer within 1 s") as caught:
            ranks.results(timeout=1.0)
        assert list(caught.value.failures) == [2]
        assert "asleep" in str(caught.value)
    assert not any(alive(process.pid) for process in ranks.processes)


def test_a_rank_that_ends_without_a_word_is_told() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: ended without a word, exit code 7"):
        run_ranks(one_exits, 2)


def test_one_rank_can_be_killed_on_purpose(tmp_path: Path) -> None:
    with start_ranks(survives, 3, str(tmp_path / "at_")) as ranks:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        ranks.kill(1)
        first, killed, third = ranks.results(30.0)
    assert killed is None
    for told in (first, third):
        assert "peer" in told


def test_a_frozen_rank_leaves_no_process(tmp_path: Path) -> None:
    with start_ranks(one_hangs, 3) as ranks:
        ranks.kill(2, signal.SIGSTOP)
        assert ranks.results(30.0, ranks=(0, 1)) == [0, 1]
        assert alive(ranks.processes[2].pid)
    assert not any(alive(process.pid) for process in ranks.processes)


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "from tests.support.ranks import start_ranks\n"
        "from tests.support.test_ranks import one_hangs\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    with start_ranks(one_hangs, 3) as ranks:\n"
        "        print(ranks.processes[2].pid, flush=True)\n"
        "        time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        assert alive(rank)
        time.sleep(0.3)  # it listens to its pipe
        parent.kill()
        parent.wait()
    end = time.monotonic() + 20
    while alive(rank) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(rank)
