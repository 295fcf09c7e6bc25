"""Fixtures and scheduling that all tests share."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from harness.failed_tests import ENDED
from harness.hosts.cluster import RayCluster, local_cluster
from harness.storage.object_server import ObjectServer, object_server
from orchestrator.report.run import page

# Set before torch is imported, here and in processes that tests start. Tensors of tests are tiny:
# on two busy cores, threads that wait for each other cost ten times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers and commands that tests start load tasks of harness.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

# A busy machine takes any time for an example.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# Thousands of tests and the modules that they import stay to the end: the garbage collector, which would go
# through all of them again and again, leaves them out (``pytest_collection_finish``).
gc.disable()

_RAY_FILES = (
    "tests/test_documentation.py",
    "tests/examples/test_examples.py",
    "tests/experts/hosts/test_actor_host.py",
    "tests/runtime/cluster/test_auth_clusters.py",
    "tests/runtime/cluster/test_prestart.py",
    "tests/runtime/data_parallel/test_fit.py",
    "tests/runtime/expert_parallel/test_calls.py",
    "tests/runtime/expert_parallel/test_chaos.py",
    "tests/runtime/expert_parallel/test_evolution_chaos.py",
    "tests/runtime/expert_parallel/test_host_pool.py",
    "tests/runtime/expert_parallel/test_run.py",
    "tests/runtime/expert_parallel/test_snapshot_store.py",
    "tests/runtime/expert_parallel/test_stuck_hosts.py",
    "tests/runtime/sweep/test_run.py",
    "tests/runtime/test_evaluation.py",
    "tests/runtime/test_namespaces.py",
    "tests/security/test_cluster_leaks.py",
)

_SOURCE_FILES = (
    "tests/test_architecture.py",
    "tests/test_import_cycles.py",
    "tests/benchmarks/test_groups.py",
    "tests/security/test_code_loading.py",
)
"""Tests that parse the whole source: one process parses it for all of them."""


def _group(file: str) -> str:
    """Return the scheduling group: files that start Ray share one worker, and so do those that parse the
    source and those that read the site of the documentation; every other file is its own group."""
    path = Path(file).as_posix()
    if path.endswith(_RAY_FILES):
        return "ray"
    if path.endswith(_SOURCE_FILES):
        return "sources"
    return "site" if "tests/docs/" in path else file


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start Ray first, because they take longest, then those that train. Leave the first
    cases of each test that is marked ``extended(but_first=N)`` to ``make test``."""
    items.sort(key=lambda item: _turn(str(item.path)))
    cases: dict[str, int] = defaultdict(int)
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        item.own_markers[:] = [mark for mark in item.own_markers if not _spares(mark, cases[test])]

        inherited = [mark for mark in item.iter_markers("extended") if mark not in item.own_markers]
        if any(mark.kwargs for mark in inherited):
            raise pytest.UsageError(f"{item.nodeid}: mark functions, not modules, with extended(but_first=N)")


def _turn(file: str) -> int:
    """Return when the tests of a file begin: files that take seconds come last, so that both workers end
    together."""
    if _group(file) == "ray":
        return 0
    return 1 if "tests/train/" in Path(file).as_posix() else 2


def _spares(mark: pytest.Mark, case: int) -> bool:
    """Return whether a mark says that the n-th case of a test is run by ``make test``."""
    return mark.name == "extended" and case <= mark.kwargs.get("but_first", 0)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how the run ended, for ``harness.failed_tests``; workers of xdist have no cache of their own."""
    if not hasattr(session.config, "workerinput") and session.config.cache is not None:
        session.config.cache.set(ENDED, int(exitstatus))


def pytest_collection_finish() -> None:
    """Collect the garbage of tests only."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each pytest worker whole groups of files, unless another distribution is asked for."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.split("::")[0])

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RayCluster]:
    """The Ray cluster of the whole suite: four CPU slots, no GPU."""
    with local_cluster(cpus=4) as started:
        yield started


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[ObjectServer]:
    with object_server() as started:
        yield started


@pytest.fixture
def s3(_s3_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A real S3 server, and the variables by which clients find it."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return _s3_server


@pytest.fixture(scope="session", autouse=True)
def _no_pictures_at_the_end() -> Iterator[Callable[[Any], bool]]:
    """Runs in this process draw no pictures at their end, which would take most of the time of a short run.

    ``orchestrator report`` draws them."""
    with pytest.MonkeyPatch.context() as patch:
        drawn = page.draws_at_end
        patch.setattr(page, "draws_at_end", lambda _: False)
        yield drawn


@pytest.fixture
def pictures_at_the_end(
    _no_pictures_at_the_end: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a test draw pictures as the setting ``plots`` says."""
    monkeypatch.setattr(page, "draws_at_end", _no_pictures_at_the_end)
