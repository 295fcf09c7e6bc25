"""The function that a new worker process runs first: it imports the modules that the process needs.

It is pickled by value and imports none of our modules to run, so that a process that does not find
our code starts all the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from orchestrator.runtime.cluster.environment import make_variable_setter

_TURN_SECONDS = 0.2
_MAX_TURNS = 600
"""Looks for its turn after which a process imports beside the others: two minutes, a slow import."""
_LOW_PRIORITY = 19
"""The nice value of imports beside work at the usual priority.

On cores that are all busy such a thread gets 1.6% of one (measured on Linux 6.18), so that torch is
imported within three minutes. A thread of the class SCHED_IDLE gets 0.5%, which takes ten, and without
privileges neither can be raised again."""


def make_importer(modules: tuple[str, ...], package: str, marker: str) -> Callable[[], None]:
    """Return a function that imports modules; those of ours only from this very package.

    ``package`` is the path of our ``__init__.py``: a node may have another package of the same
    name. While a process of the run works on the node (see ``marked_as_working``), new processes
    import at the lowest priority, one after the other.
    """
    # Ray sets one OpenMP thread for each CPU of an actor, but later; torch reads the number when it
    # is imported.
    set_threads = make_variable_setter({"OMP_NUM_THREADS": "1"})
    run_beside_work = _make_low_priority_runner(marker)

    def import_modules() -> None:
        import importlib
        from importlib.util import find_spec

        for name in modules:
            try:
                spec = find_spec("orchestrator") if name.startswith("orchestrator.") else None
                if spec is None or spec.origin == package:
                    importlib.import_module(name)
            except Exception:  # the code that needs the module reports the error
                continue

    def import_as_started() -> None:
        set_threads()
        run_beside_work(import_modules)

    return import_as_started


@contextmanager
def marked_as_working(marker: str) -> Iterator[None]:
    """Show to new processes of this node that this one works for the run.

    The mark is the name of an abstract socket: it ends with the process, however that ends."""
    with socket.socket(socket.AF_UNIX) as mark:
        with suppress(OSError):  # only Linux has such names
            mark.bind(f"\0{marker}/working/{os.getpid()}")
        yield


def _make_low_priority_runner(marker: str) -> Callable[[Callable[[], None]], None]:
    """Return a function that runs another one at the lowest priority where the run is at work."""
    working_prefix = f"@{marker}/working/"
    turn_name = f"\0{marker}/import"

    def may_lower() -> bool:
        import os
        import sys

        # Libraries start threads for linear algebra as they are imported, unless they are to use
        # one thread. Such threads would keep the low priority for good.
        if sys.platform != "linux" or os.environ.get("OMP_NUM_THREADS") != "1":
            return False
        try:
            with open("/proc/net/unix", encoding="utf-8") as sockets:
                return working_prefix in sockets.read()
        except OSError:
            return False

    def run_in_turn(function: Callable[[], None]) -> None:
        import os
        import socket
        import threading
        import time
        from contextlib import suppress

        thread_id = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, _LOW_PRIORITY)
        with socket.socket(socket.AF_UNIX) as turn:
            for _ in range(_MAX_TURNS):
                try:
                    turn.bind(turn_name)  # one process at a time; a dead one gives up its turn
                    break
                except OSError:
                    time.sleep(_TURN_SECONDS)
            function()

    def run(function: Callable[[], None]) -> None:
        import threading

        if not may_lower():
            function()
            return
        # In a thread of its own, which ends with its priority: without privileges a thread cannot
        # raise its priority again, and this process may become a host.
        thread = threading.Thread(target=run_in_turn, args=(function,), name="import")
        thread.start()
        thread.join()

    return run
