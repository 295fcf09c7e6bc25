"""Private APIs and monkeypatches of Ray, each behind a function of our own.

No other module imports ``ray._private``, ``ray._raylet``, ``ray._common``, ``ray.core.generated``
or ``ray.train.v2._internal``, so a new Ray release needs changes here only. Ray may change these
APIs in any minor release: importing this module under an untested release raises an error.

Every function imports its part of Ray when it is called. Ray Train and Ray Tune take seconds to
import, and expert hosts and most commands use neither.

Run on Ray 2.60; 2.56 and 2.58 have the same names, and ran all but the start without services.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.runtime_env import RuntimeEnv
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from orchestrator.errors import UserError

OLDEST_RAY = (2, 56)
"""The first supported release, inclusive."""
NEWEST_RAY = (2, 61)
"""The end of the supported releases, exclusive."""
SUPPORTED_RAY = f">={OLDEST_RAY[0]}.{OLDEST_RAY[1]},<{NEWEST_RAY[0]}.{NEWEST_RAY[1]}"
"""The same bounds as ``pyproject.toml`` has them."""


def check_ray_version(version: str) -> None:
    """Raise UserError unless the private APIs below were tested with this version of Ray."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else None
    if release is None or not OLDEST_RAY <= release < NEWEST_RAY:
        raise UserError(
            f"Ray {version} is installed; this release was tested with ray{SUPPORTED_RAY} and uses private "
            f"APIs of Ray that change between releases. Install one of these: "
            f"pip install 'ray[default,train,tune]{SUPPORTED_RAY}'"
        )


check_ray_version(ray.__version__)


# --- authentication


def reload_auth_mode() -> None:
    """Make Ray read RAY_AUTH_MODE again.

    Ray reads it once, when it is imported, and has no public way to change it in a running process.
    """
    from ray._raylet import Config  # pyrefly: ignore[missing-module-attribute]

    Config.initialize("")


def forget_auth_token() -> None:
    """Drop the token that Ray has cached.

    Without this, Ray does not see a token written after its first look.
    """
    from ray._raylet import AuthenticationTokenLoader  # pyrefly: ignore[missing-module-attribute]

    AuthenticationTokenLoader.instance().reset_cache()


def has_auth_token() -> bool:
    """Whether Ray would find a token, in any of the places where it looks.

    The search order (two variables, then a file) is Ray's; it has no public function for it.
    """
    from ray._raylet import AuthenticationTokenLoader  # pyrefly: ignore[missing-module-attribute]

    try:
        return AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    except AuthenticationError:  # RAY_AUTH_TOKEN_PATH names a file that is missing or empty
        return False


def check_head_alive(channel: Any, timeout_s: float) -> None:
    """Send the cheapest request that a cluster's head answers, over a gRPC channel. Raises grpc.RpcError.

    Ray's own clients would add the token to the request; this one must not.
    """
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    request = gcs_service_pb2.CheckAliveRequest()
    gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(request, timeout=timeout_s)


def load_tls_certificates() -> tuple[bytes, bytes, bytes]:
    """Return the certificate chain, key and root that Ray's RAY_TLS_* variables name.

    Ray keeps the reader private.
    """
    from ray._common.tls_utils import load_certs_from_env

    return load_certs_from_env()


# --- the cluster


def find_local_cluster(temp_dir: str | None) -> str | None:
    """Return HOST:PORT of the cluster that was last started on this machine.

    ``ray.init(address="auto")`` finds it too, but waits for minutes if that cluster is gone.
    """
    from ray._private.services import find_bootstrap_address

    return find_bootstrap_address(temp_dir)


def autoscaler_limits() -> Mapping[str, float]:
    """Return the most resources that the autoscaler may bring the cluster to; empty without an autoscaler.

    The public API knows present resources only.
    """
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() or {}


def started_cluster() -> bool:
    """Return whether this process has started the cluster that it uses, and no other node has joined.

    The public API does not tell a cluster that was joined from one that was started.
    """
    from ray._private.worker import global_worker

    if global_worker.node is None or not global_worker.node.is_head():
        return False
    return sum(node["Alive"] for node in ray.nodes()) == 1


def logs_folder() -> Path | None:
    """Return the folder of Ray's own logs on this node; None outside a node.

    The public API does not name it.
    """
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_logs_dir_path()) if global_worker.node else None


def placement_groups_of_job(job_id: str) -> set[bytes]:
    """Return the ids of the placement groups of a job that still hold resources.

    The public ``placement_group_table()`` does not name the job that created a group.
    """
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData

    job = bytes.fromhex(job_id)
    table = state._connect_and_get_accessor().get_placement_group_table()
    rows = [PlacementGroupTableData.FromString(row) for row in table]
    return {
        row.placement_group_id
        for row in rows
        if row.creator_job_id == job and row.state != PlacementGroupTableData.REMOVED
    }


def remove_placement_group_by_id(group_id: bytes) -> None:
    """Remove a placement group that another process created.

    The public function wants the object, not the id.
    """
    from ray._raylet import PlacementGroupID

    remove_placement_group(PlacementGroup(PlacementGroupID(group_id)))


def disable_auto_connect() -> None:
    """Keep calls to Ray from starting a cluster where there is none.

    The public variable RAY_ENABLE_AUTO_CONNECT is read only when Ray is imported.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


# --- worker processes that start before they are needed


def export_setup_hook(prepare: Callable[[], None], timeout_s: int) -> dict[str, str]:
    """Store a function in the cluster; return the variables that make new worker processes call it first.

    The public ``worker_process_setup_hook`` takes effect for a whole job; this one for single
    actors. Returns nothing if the job has a hook of its own: a process runs one hook only.
    """
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    from ray._private.runtime_env.setup_hook import decode_function_key
    from ray._private.worker import global_worker

    if WORKER_PROCESS_SETUP_HOOK_ENV_VAR in ray.get_runtime_context().runtime_env.env_vars():
        return {}
    key = global_worker.function_actor_manager.export_setup_func(prepare, timeout=timeout_s)
    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: decode_function_key(key)}


def niceness_variable() -> str:
    """Return the name of the variable with the niceness of worker processes."""
    from ray._private.ray_constants import RAY_WORKER_NICENESS

    return RAY_WORKER_NICENESS


def prestart_request(
    num_processes: int, keep_alive_s: int, variables: Mapping[str, str] | None = None
) -> Any:
    """Return a request for idle worker processes of this job, with the environment of this process.

    With ``variables`` they have the environment of an actor with these variables. Ray has no public
    call that starts idle processes and keeps them.
    """
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest

    context = ray.get_runtime_context()
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(context.get_job_id()),
        num_workers=num_processes,
        keep_alive_duration_secs=keep_alive_s,
    )
    environment = context.get_runtime_env_string()
    if variables is not None:
        environment = RuntimeEnv(env_vars=dict(variables)).serialize()
    request.runtime_env_info.serialized_runtime_env = environment
    return request


def send_prestart_request(address: str, request: Any, timeout_s: float) -> None:
    """Send a request of ``prestart_request`` to the raylet at HOST:PORT."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

    # The channel is of the synchronous kind.
    with init_grpc_channel(address) as channel:  # pyrefly: ignore[bad-context-manager]
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=timeout_s)


# --- Ray Train


async def run_train_controller(parts: dict[str, Any]) -> Any:
    """Run Ray Train's controller in this process; return its result.

    ``DataParallelTrainer._initialize_and_run_controller`` starts an actor for it, whose process imports
    Ray Train once more, at each restart: a restart after a kill then takes 3.5 times the CPU time (19.0 s
    instead of 5.5; ``benchmarks/LOG.md``, 2026-11-18). Ray had a variable against that (its pull request
    49522) and removed it (55556).

    Two more actors are left out. One passes requests on to an autoscaler, which the session does; it is
    detached, and would stay in a cluster that the run has joined. One lets workers wait for each other
    in ``ray.train.report``, which ours never call.
    """
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class UnannouncedScalingPolicy(FixedScalingPolicy):
        def _send_resource_request(self) -> None:
            pass

        _maybe_send_resource_request = _send_resource_request
        _cancel_resource_request = _send_resource_request

    policy: Any = UnannouncedScalingPolicy(parts["scaling_policy"].scaling_config)
    with _controller_outside_of_actors():
        controller = TrainController(**parts | {"scaling_policy": policy})
        await controller.run()
    return controller.get_result()


# --- monkeypatches


@contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module or a class as long as the block runs."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextmanager
def hidden_worker_output(*prefixes: str) -> Iterator[None]:
    """Keep Ray from printing messages with a line that begins with one of these prefixes.

    Ray prints half a page for each process that dies, past its own ``log_to_driver=False``.
    """
    from ray._private import worker as ray_worker

    print_original: Any = ray_worker.print_to_stdstream

    def print_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not any(str(line).startswith(prefixes) for line in data["lines"]):
            print_original(data, *args, **kwargs)

    with _replaced(ray_worker, print_to_stdstream=print_others):
        yield


class _NoActor:
    """Stands for the class of an actor that is not started, and for its handle."""

    @classmethod
    def options(cls, **_: Any) -> type[_NoActor]:
        return cls

    @classmethod
    def remote(cls, **_: Any) -> type[_NoActor]:
        return cls


@contextmanager
def _controller_outside_of_actors() -> Iterator[None]:
    """Let Ray Train's controller work in a process that is no actor, and without the actor for reports."""
    from ray.runtime_context import RuntimeContext
    from ray.train.v2._internal.execution.worker_group import state, worker_group

    with (
        _replaced(worker_group, SynchronizationActor=_NoActor),
        _replaced(state, _shutdown_sync_actor=lambda _: None),
        # Workers are given a handle of the controller, which they ask for reported checkpoints.
        _replaced(RuntimeContext, current_actor=None),
    ):
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def fewer_services() -> Iterator[None]:
    """Let ``ray.init`` start a cluster without the services that a single run does not use.

    These are the head of the dashboard, which ``include_dashboard=False`` still starts, the autoscaler,
    and the monitor of logs. They take three seconds of CPU time, and ``ray.init`` waits for the first.
    """
    from ray._private import utils as ray_utils
    from ray._private.node import Node

    with (
        _replaced(
            Node, start_api_server=_do_nothing, start_monitor=_do_nothing, start_log_monitor=_do_nothing
        ),
        # Ray looks for the packages of the dashboard by importing them.
        _replaced(ray_utils, get_dashboard_dependency_error=lambda: "not needed"),
    ):
        yield


@contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """Keep ``ray.init`` and ``ray.shutdown`` from replacing the process's handler of SIGTERM.

    Ray's own ends the process with exit code 15 or 1, wherever it is, even while the cluster starts. Its
    C++ part installs another one, which prints stacks and may abort, and at the end the default one. Ray
    has no option for any of them.
    """
    from ray._private import utils as ray_utils
    from ray._private import worker as ray_worker

    handler = signal.getsignal(signal.SIGTERM)
    connect = ray_worker.connect

    def install_again() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def connect_undisturbed(*arguments: Any, **named: Any) -> Any:
        # Ray's processes run already, and do not inherit this. A signal waits for our handler.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return connect(*arguments, **named)
        finally:
            install_again()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with (
            _replaced(ray_utils, set_sigterm_handler=_do_nothing),
            _replaced(ray_worker, connect=connect_undisturbed),
        ):
            yield
    finally:
        install_again()


@contextmanager
def masked_entrypoint(mask: Callable[[str], str]) -> Iterator[None]:
    """Mask the command line that ``ray.init`` stores with the job.

    All users of the cluster can read it, and an address in it may hold a password. Ray has no
    option for it.
    """
    from ray._private import utils as ray_utils

    entrypoint_original = ray_utils.get_entrypoint_name
    with _replaced(ray_utils, get_entrypoint_name=lambda: mask(entrypoint_original())):
        yield


@contextmanager
def unpropagated_variables(prefix: str) -> Iterator[None]:
    """Keep Ray Tune from copying environment variables with this prefix into its actors.

    Tune writes AWS keys into the description of each trial's actor, which all users of the
    cluster can read. Ray has no option for it.
    """
    from ray.tune.execution import class_cache

    names = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith(prefix)}
    with _replaced(class_cache, ENV_VARS_TO_PROPAGATE=names):
        yield
