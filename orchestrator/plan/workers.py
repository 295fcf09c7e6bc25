"""One process or several workers: their number, the backend of their collectives, the sharding of
the model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    ShardingForm,
    estimate_memory,
)
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.strategies import STRATEGIES, StrategyName
from orchestrator.types import Choice, Rejected, bytes_text

_SHARDING_FORMS: tuple[ShardingForm, ...] = ("none", "zero2", "zero3")
_WORKER_BYTES = 300 * 2**20  # of a process with Ray and torch, before it has a model
_MAX_CPU_WORKERS = 4  # on this machine: enough to be parallel, few enough to leave each a core
_SINGLE = Rejected("single", "the other devices would be idle")
_DATA_PARALLEL = Rejected("data_parallel", "set it with --parallel-strategy data_parallel")


def choose_strategy(
    config: Config, inventory: Inventory, in_cluster: bool = False, cluster: Cluster | None = None
) -> Choice[StrategyName]:
    """Choose one process or several, before the model is known.

    ``inventory`` is this machine; ``in_cluster`` says that this process runs inside a Ray job.
    ``cluster`` is only needed for the reason, if it is known.
    Flags decide first. Otherwise one GPU or none means a single process, and several GPUs mean one
    worker for each. The model later decides between data-parallel and expert-parallel workers
    (``settle_strategy``).
    """
    flag = workers_flag(config)
    if flag:
        return Choice(config.parallel.asked_strategy.name, f"set by {flag}")
    if config.parallel.workers == 1:
        return Choice("single", "set by --workers 1", (_DATA_PARALLEL,))
    if config.device.gpu_mode in ("cpu", "single_gpu"):
        return Choice("single", f"--gpu-mode {config.device.gpu_mode} is one device", (_DATA_PARALLEL,))
    if not config.run.auto:
        return Choice("single", NO_AUTO)
    if cluster is not None and cluster.described:
        return Choice("data_parallel", cluster.text("GPUs"), (_SINGLE,))
    if in_cluster:
        single = Rejected("single", "would stay on one node")
        return Choice("data_parallel", "this runs inside a Ray cluster, which places the workers", (single,))
    gpus = chosen_gpus(inventory, config.parallel.devices)
    if len(gpus) > 1:
        return Choice("data_parallel", f"{len(gpus)} GPUs were found, one for each worker", (_SINGLE,))
    if not gpus:
        reason = inventory.gpu_error or "no GPU was found"
    elif config.parallel.devices:
        reason = f"--devices {_devices_text(config)} is one GPU"
    else:
        reason = "one GPU was found"
    return Choice("single", reason, (Rejected("data_parallel", "needs two GPUs or more"),))


def trains_in_process(config: Config, inventory: Inventory, in_cluster: bool) -> bool:
    """Return whether the run trains in this process, without workers."""
    return STRATEGIES[choose_strategy(config, inventory, in_cluster).value].in_process


def workers_flag(config: Config) -> str | None:
    """Return the flag that demands several workers, or a cluster to run on; None if no flag
    does."""
    parallel = config.parallel
    live = "--recovery live" if parallel.recovery == "live" else ""
    if parallel.parallel_strategy != "auto":
        return f"--parallel-strategy {parallel.parallel_strategy} {live}".rstrip()
    if live:
        return live
    if isinstance(parallel.workers, int) and parallel.workers > 1:
        return f"--workers {parallel.workers}"
    if config.device.gpu_mode == "multi_gpu":
        return "--gpu-mode multi_gpu"
    if parallel.ray_address != "auto":
        return f"--ray-address {parallel.ray_address}"
    if len(parallel.devices) > 1 and parallel.workers == "auto":
        return f"--devices {_devices_text(config)}"
    return None


def _devices_text(config: Config) -> str:
    return ",".join(str(index) for index in config.parallel.devices)


def check_gpu_mode(config: Config, num_gpus: int, gpu_error: str | None) -> None:
    """Refuse to run if ``--gpu-mode single_gpu`` or ``multi_gpu`` demands more GPUs than there
    are."""
    mode = config.device.gpu_mode
    demands = {"single_gpu": (1, "one GPU", "auto or cpu"), "multi_gpu": (2, "two GPUs or more", "auto")}
    if mode not in demands:
        return
    least, needed, instead = demands[mode]
    if num_gpus < least:
        why = f": {gpu_error}" if gpu_error and not num_gpus else ""
        raise ResourceError(
            f"--gpu-mode {mode} needs {needed}; {num_gpus} {'was' if num_gpus == 1 else 'were'} found{why}. "
            f"Use --gpu-mode {instead}, or see 'orchestrator check'"
        )


def uses_gpus(config: Config, cluster: Cluster) -> bool:
    """Return whether each worker takes a GPU of the cluster."""
    return config.device.gpu_mode != "cpu" and cluster.reachable_gpus > 0


def choose_workers(config: Config, cluster: Cluster, inventory: Inventory) -> Choice[int]:
    """Choose the number of workers: as set, or one for each GPU; on CPUs a few, or one for each
    node.

    ``inventory`` says why GPUs cannot be used, if that is known.
    """
    if config.parallel.devices and cluster.joined:
        raise UserError(
            f"--devices {_devices_text(config)} names GPUs of this machine, but the workers run in "
            f"a cluster, "
            f"which assigns its GPUs itself; choose their number with --workers, or start a "
            f"cluster here with "
            f"--ray-address local"
        )
    check_gpu_mode(config, cluster.reachable_gpus, inventory.gpu_error)
    on_gpu = uses_gpus(config, cluster)
    workers = config.parallel.workers
    if workers != "auto":
        return _given_workers(workers, num_spares(config), cluster, on_gpu, inventory)
    if config.device.gpu_mode == "single_gpu":
        return Choice(1, "--gpu-mode single_gpu is one worker")
    return _gpu_workers(cluster, num_spares(config)) if on_gpu else _cpu_workers(cluster, inventory)


def num_spares(config: Config) -> int:
    """Return the number of standby hosts, each with a device of its own."""
    return config.parallel.spares if config.parallel.asked_strategy.replaces_workers else 0


def _given_workers(
    workers: int, spares: int, cluster: Cluster, on_gpu: bool, inventory: Inventory
) -> Choice[int]:
    """Return the number of ``--workers`` if the cluster can hold it, standby hosts included."""
    reason = f"set by --workers {workers}"
    flags = f"--workers {workers}" + (f" with --spares {spares}" if spares else "")
    lower = "Lower --workers" + (" or --spares" if spares else "")
    needed = workers + spares
    # A local cluster declares as many CPU slots as the run needs, so only memory limits it.
    if not on_gpu and not cluster.joined:
        _check_ram(needed, flags, lower, inventory)
        return Choice(workers, f"{reason}, on CPUs")
    kind = "GPUs" if on_gpu else "CPUs"
    present = cluster.gpus if on_gpu else cluster.cpus
    reachable = cluster.reachable_gpus if on_gpu else cluster.reachable_cpus
    if needed > reachable:
        reach = f" and its autoscaler reaches {reachable}" if reachable > present else ""
        instead = "add nodes to the cluster"
        if on_gpu and not cluster.joined:
            instead = "use --gpu-mode cpu to train on CPUs"
        raise ResourceError(
            f"{flags} needs {needed} {kind}, one each; {cluster.text(kind)}{reach}. {lower}, or {instead}"
        )
    if needed > present:
        return Choice(workers, f"{reason}; {cluster.text(kind)}, and its autoscaler can reach {reachable}")
    return Choice(workers, f"{reason}; {cluster.text(kind)}")


def _check_ram(processes: int, flags: str, lower: str, inventory: Inventory) -> None:
    needed_bytes = processes * _WORKER_BYTES
    if needed_bytes > inventory.ram_free:
        raise ResourceError(
            f"{flags} needs {bytes_text(needed_bytes)} of RAM for its processes alone; "
            f"{bytes_text(inventory.ram_free)} is free. {lower}: this machine has {inventory.cores} cores"
        )


def _gpu_workers(cluster: Cluster, spares: int) -> Choice[int]:
    present = cluster.text("GPUs")
    if not cluster.gpus:
        reason = f"there is no GPU yet, and the autoscaler can reach {cluster.reachable_gpus}"
        return Choice(cluster.reachable_gpus, reason)
    if not spares:
        return Choice(cluster.gpus, f"each GPU has a worker: {present}")
    if cluster.gpus <= spares:
        raise ResourceError(f"--spares {spares} leaves no GPU to train on; {present}. Lower --spares")
    return Choice(cluster.gpus - spares, f"each GPU has a worker, except the {spares} of --spares: {present}")


def _cpu_workers(cluster: Cluster, inventory: Inventory) -> Choice[int]:
    if cluster.joined:
        count = max(1, sum(1 for node in cluster.nodes if node.cpus))
        return Choice(count, f"each node has a worker, because no GPU can be used: {cluster.text('CPUs')}")
    count = min(_MAX_CPU_WORKERS, max(1, inventory.cores))
    reason = f"each of {inventory.cores} usable cores has a worker, at most {_MAX_CPU_WORKERS}"
    return Choice(count, reason)


def choose_backend(config: Config, on_gpu: bool, workers: int) -> Choice[str]:
    """Choose the backend of the collectives. NCCL works only between GPUs."""
    backend = config.parallel.backend
    if backend == "nccl" and not on_gpu:
        raise ResourceError(
            f"--backend nccl needs a GPU for each of the {workers} workers; they train on CPUs. "
            f"Use --backend gloo, or leave it out"
        )
    if backend != "auto":
        slow = "; slower than nccl between GPUs" if on_gpu and backend == "gloo" else ""
        return Choice(backend, f"set by --backend {backend}{slow}")
    if on_gpu:
        return Choice("nccl", "the workers have GPUs", (Rejected("gloo", "reduces in host memory"),))
    return Choice("gloo", "the workers train on CPUs", (Rejected("nccl", "works between GPUs only"),))


_PACKED_WHOLE: Choice[ShardingForm] = Choice(
    "none",
    "packed bytes are not divided among the workers",
    (Rejected("zero2", "works with --frozen-weights auto"),),
)


def choose_sharding(
    config: Config, facts: ModelFacts, workers: int, limit_bytes: float, on_gpu: bool, evolves: bool = False
) -> Choice[ShardingForm]:
    """Choose how the model's state is sharded: the least that lets one sample fit.

    Sharding costs speed, so it is chosen only if memory is short. Recomputation of activations is
    tried first. Experts that change (``evolves``) must be whole.
    """
    check_cpu(config, on_gpu)
    form = config.parallel.sharding
    offload = config.parallel.cpu_offload
    if form != "auto":
        return Choice(form, f"set by --sharding {form}")
    if config.model.frozen_weights != "auto":
        return _PACKED_WHOLE
    if evolves:
        whole = Rejected("zero2", "divides the weights of experts; it needs --evolution off")
        return Choice("none", "evolution changes whole experts", (whole,))
    if workers == 1 and not offload:
        return Choice("none", "one worker has nothing to shard")
    if not on_gpu:
        reason = "the workers train on CPUs and share the memory of the host"
        return Choice("none", reason, (Rejected("zero2", "try --sharding zero2"),))
    if not config.run.auto and not offload:
        return Choice("none", NO_AUTO)
    forms = _SHARDING_FORMS[1:] if offload else _SHARDING_FORMS
    needed = {
        each: one_sample_memory(config, facts, limit_bytes, whole_models(config, workers, each))
        for each in forms
    }
    if "none" in needed and needed["none"].fits:
        total = bytes_text(needed["none"].total)
        reason = (
            f"with a copy on every worker one sample needs {total} of the usable {bytes_text(limit_bytes)}"
        )
        zero2 = Rejected("zero2", "costs speed, and memory is not short")
        zero3 = Rejected("zero3", "costs speed, and gathers the parameters in every pass")
        return Choice("none", reason, (zero2, zero3))
    why = "--cpu-offload needs shards" if offload else "a copy on every worker does not fit"
    return _least_that_fits(needed, limit_bytes, why, "the finest sharding")


def _least_that_fits(
    needed: Mapping[ShardingForm, MemoryEstimate], limit_bytes: float, why: str, finest: str
) -> Choice[ShardingForm]:
    """Choose the least sharding with which one sample fits, which is the fastest; else the finest."""
    fitting = [form for form in needed if needed[form].fits]
    chosen: ShardingForm = fitting[0] if fitting else "zero3"
    rejected = tuple(
        Rejected(form, _why_not(form, chosen, needed[form])) for form in needed if form != chosen
    )
    total = bytes_text(needed[chosen].total)
    usable = bytes_text(limit_bytes)
    reason = f"{why}; one sample needs {total} of the usable {usable}"
    if not needed[chosen].fits:
        reason = f"{finest}: one sample needs {total}, more than the usable {usable}"
    return Choice(chosen, reason, rejected)


def choose_dense_sharding(
    config: Config,
    facts: ModelFacts,
    on_hosts: ModelSharding,
    limit_bytes: float,
    on_gpu: bool,
) -> Choice[ShardingForm]:
    """Choose how expert hosts shard the dense part: the least that lets one sample fit.

    ``on_hosts`` is the division of the experts. By itself the plan shards on GPUs alone."""
    form = config.parallel.sharding
    if form != "auto":
        return Choice(form, f"set by --sharding {form}: the dense part is sharded, experts are whole")
    if config.model.frozen_weights != "auto":
        return _PACKED_WHOLE
    whole = "the experts are divided among the hosts; the rest is whole on each"
    if on_hosts.workers == 1 or not on_gpu or not config.run.auto or facts.own_optimizer:
        return Choice("none", whole)
    needed = {
        each: one_sample_memory(config, facts, limit_bytes, replace(on_hosts, dense=each))
        for each in _SHARDING_FORMS
    }
    if needed["none"].fits:
        return Choice("none", whole, (Rejected("zero2", "costs speed, and memory is not short"),))
    why = "a whole dense part on every host does not fit"
    return _least_that_fits(needed, limit_bytes, why, "the finest sharding of the dense part")


def check_cpu(config: Config, on_gpu: bool) -> None:
    """Raise ResourceError for settings that torch supports on GPUs only."""
    if on_gpu:
        return
    flags = {
        "--cpu-offload": config.parallel.cpu_offload,
        "--sync-batchnorm": config.parallel.sync_batchnorm,
    }
    for flag, given in flags.items():
        if given:
            raise ResourceError(
                f"{flag} works for workers with GPUs, and these train on CPUs; leave it out, "
                f"or use --gpu-mode multi_gpu on a machine with GPUs"
            )


def check_data_tasks(facts: ModelFacts, workers: int, cluster: Cluster, on_gpu: bool) -> None:
    """Refuse workers that leave no CPU to the tasks that compute the data: both would wait forever."""
    if facts.has_data_tasks and not on_gpu and workers >= cluster.reachable_cpus:
        raise ResourceError(
            f"the tasks of the Ray Data set need a CPU, and {workers} workers take all: "
            f"{cluster.text('CPUs')}. Lower --workers, or give the data as dataset.materialize()"
        )


def whole_models(config: Config, workers: int, form: ShardingForm) -> ModelSharding:
    """Return how workers that each have the whole model, or shards of it, divide its state."""
    copies = config.parallel.asked_strategy.copies_gradients or config.run.reproducible
    return ModelSharding(workers, form, config.parallel.cpu_offload, gradient_copies=copies)


def _why_not(form: ShardingForm, chosen: ShardingForm, needed: MemoryEstimate) -> str:
    coarser = _SHARDING_FORMS.index(form) < _SHARDING_FORMS.index(chosen)
    return f"one sample would need {bytes_text(needed.total)}" if coarser else "slower"


def one_sample_memory(
    config: Config, facts: ModelFacts, limit_bytes: float, sharding: ModelSharding
) -> MemoryEstimate:
    """Return the memory of one sample, with recomputation if it is set, or if it is allowed and
    needed."""
    setting = config.device.activation_checkpointing
    plain = estimate_memory(facts, 1, False, limit_bytes, sharding)
    recomputed = estimate_memory(facts, 1, True, limit_bytes, sharding)
    may_recompute = setting == "on" or (setting == "auto" and config.run.auto and not plain.fits)
    return recomputed if may_recompute and recomputed.total < plain.total else plain
