"""One device or several: who trains, over what they talk, and what is divided among them. Pure."""

from __future__ import annotations

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
from orchestrator.types import Choice, Rejected, StrategyName, bytes_text

PLAIN = "plain default, because of --no-auto"
_FORMS: tuple[ShardingForm, ...] = ("none", "zero2", "zero3")
_WORKER_BYTES = 300 * 2**20  # of a process with Ray and torch, before it has a model
_CPU_WORKERS = 4  # on a machine of our own: enough to be parallel, few enough to leave each a core
_ALONE = Rejected("single", "the other devices would be idle")
_TOGETHER = Rejected("data_parallel", "ask for it with --parallel-strategy data_parallel")


def choose_strategy(config: Config, inventory: Inventory, in_cluster: bool = False) -> Choice[StrategyName]:
    """One process or several, before the model is known. ``inventory`` is this machine; ``in_cluster`` says that we run inside a
    Ray job. What was asked for goes first, then the rules of document 001: no GPU or one, a single process; several, one process
    for each. Whether several train data-parallel or expert-parallel, the model decides (``settle_strategy``)."""
    asked = asks_for_workers(config)
    if asked:
        return Choice(
            "expert_parallel" if config.parallel.parallel_strategy == "expert_parallel" else "data_parallel",
            f"asked for by {asked}",
        )
    if config.parallel.workers == 1:
        return Choice("single", "asked for by --workers 1", (_TOGETHER,))
    if config.device.gpu_mode in ("cpu", "single_gpu"):
        return Choice("single", f"--gpu-mode {config.device.gpu_mode} is one device", (_TOGETHER,))
    if not config.run.auto:
        return Choice("single", PLAIN)
    if in_cluster:
        return Choice(
            "data_parallel",
            "this runs inside a Ray cluster, which places the workers",
            (Rejected("single", "would stay on one node"),),
        )
    gpus = chosen_gpus(inventory, config.parallel.devices)
    if len(gpus) > 1:
        return Choice("data_parallel", f"{len(gpus)} GPUs were found: one worker for each", (_ALONE,))
    chosen = f"--devices {_devices(config)} is one GPU" if config.parallel.devices else "one GPU was found"
    return Choice(
        "single",
        chosen if gpus else inventory.gpu_error or "no GPU was found",
        (Rejected("data_parallel", "needs two GPUs or more"),),
    )


def asks_for_workers(config: Config) -> str | None:
    """The flag that asks for several workers, or for a cluster to run on."""
    parallel = config.parallel
    if parallel.parallel_strategy != "auto":
        return f"--parallel-strategy {parallel.parallel_strategy}"
    if isinstance(parallel.workers, int) and parallel.workers > 1:
        return f"--workers {parallel.workers}"
    if config.device.gpu_mode == "multi_gpu":
        return "--gpu-mode multi_gpu"
    if parallel.ray_address != "auto":
        return f"--ray-address {parallel.ray_address}"
    if len(parallel.devices) > 1 and parallel.workers == "auto":
        return f"--devices {_devices(config)}"
    return None


def _devices(config: Config) -> str:
    return ",".join(str(index) for index in config.parallel.devices)


def check_gpu_mode(config: Config, found: int, gpu_error: str | None) -> None:
    """``single_gpu`` and ``multi_gpu`` are demands: without the GPUs they name nothing runs."""
    mode = config.device.gpu_mode
    least, words, instead = {
        "single_gpu": (1, "one GPU", "auto or cpu"),
        "multi_gpu": (2, "two GPUs or more", "auto"),
    }.get(mode, (0, "", ""))
    if found < least:
        why = f": {gpu_error}" if gpu_error and not found else ""
        raise ResourceError(
            f"--gpu-mode {mode} needs {words}; {found} {'was' if found == 1 else 'were'} found{why}. "
            f"Use --gpu-mode {instead}, or see 'orchestrator check'"
        )


def on_gpus(config: Config, cluster: Cluster) -> bool:
    """Whether each worker takes a GPU of the cluster."""
    return config.device.gpu_mode != "cpu" and cluster.reachable_gpus > 0


def choose_workers(config: Config, cluster: Cluster, inventory: Inventory) -> Choice[int]:
    """How many workers train together: as asked, or one for each GPU; on CPUs a few, or one for each node. ``inventory``
    says why GPUs cannot be used, where that is known."""
    if config.parallel.devices and cluster.joined:
        raise UserError(
            f"--devices {_devices(config)} names GPUs of this machine, but the workers run in a cluster, which assigns its GPUs itself; "
            f"choose their number with --workers, or start a cluster here with --ray-address local"
        )
    check_gpu_mode(config, cluster.reachable_gpus, inventory.gpu_error)
    on_gpu, asked = on_gpus(config, cluster), config.parallel.workers
    if asked != "auto":
        return _workers_asked(asked, spares_of(config), cluster, on_gpu, inventory)
    if config.device.gpu_mode == "single_gpu":
        return Choice(1, "--gpu-mode single_gpu is one worker")
    return _all_gpus(cluster, spares_of(config)) if on_gpu else _cpu_workers(cluster, inventory)


def spares_of(config: Config) -> int:
    """Hosts that stand by, each with a device of its own."""
    return config.parallel.spares if config.parallel.parallel_strategy == "expert_parallel" else 0


def _workers_asked(
    asked: int, spares: int, cluster: Cluster, on_gpu: bool, inventory: Inventory
) -> Choice[int]:
    reason, given = (
        f"asked for by --workers {asked}",
        f"--workers {asked}" + (f" with --spares {spares}" if spares else ""),
    )
    needed, lower = asked + spares, "Lower --workers" + (" or --spares" if spares else "")
    kind, now, most = (
        ("GPUs", cluster.gpus, cluster.reachable_gpus)
        if on_gpu
        else ("CPUs", cluster.cpus, cluster.reachable_cpus)
    )
    if not on_gpu and not cluster.joined:
        if needed * _WORKER_BYTES > inventory.ram_free:
            need, free = bytes_text(needed * _WORKER_BYTES), bytes_text(inventory.ram_free)
            raise ResourceError(
                f"{given} needs {need} of RAM for its processes alone; {free} are free. {lower}: this machine has {inventory.cores} cores"
            )
        return Choice(asked, f"{reason}, on CPUs")
    if needed > most:
        reach = f" and its autoscaler reaches {most}" if cluster.autoscaling and most > now else ""
        instead = (
            "use --gpu-mode cpu to train on CPUs"
            if on_gpu and not cluster.joined
            else "add nodes to the cluster"
        )
        raise ResourceError(
            f"{given} needs {needed} {kind}, one each; {cluster.text(kind)}{reach}. {lower}, or {instead}"
        )
    if needed > now:
        return Choice(asked, f"{reason}; {cluster.text(kind)}, and its autoscaler can bring {most}")
    return Choice(asked, f"{reason}; {cluster.text(kind)}")


def _all_gpus(cluster: Cluster, spares: int) -> Choice[int]:
    if cluster.gpus > spares > 0:
        return Choice(
            cluster.gpus - spares, f"one for each GPU but the {spares} of --spares: {cluster.text('GPUs')}"
        )
    if spares and cluster.gpus:
        raise ResourceError(
            f"--spares {spares} leaves no GPU to train on; {cluster.text('GPUs')}. Lower --spares"
        )
    if cluster.gpus:
        return Choice(cluster.gpus, f"one for each GPU: {cluster.text('GPUs')}")
    return Choice(
        cluster.reachable_gpus, f"no GPU is there yet, and the autoscaler can bring {cluster.reachable_gpus}"
    )


def _cpu_workers(cluster: Cluster, inventory: Inventory) -> Choice[int]:
    if cluster.joined:
        count = max(1, sum(1 for node in cluster.nodes if node.cpus))
        return Choice(count, f"one for each node, as there are no GPUs to use: {cluster.text('CPUs')}")
    count = min(_CPU_WORKERS, max(1, inventory.cores))
    return Choice(count, f"CPUs: one for each core, at most {_CPU_WORKERS}; {inventory.cores} usable cores")


def choose_backend(config: Config, on_gpu: bool, workers: int) -> Choice[str]:
    """What carries sums between workers. NCCL speaks only between GPUs."""
    asked = config.parallel.backend
    if asked == "nccl" and not on_gpu:
        raise ResourceError(
            f"--backend nccl needs a GPU for each of the {workers} workers; they train on CPUs. Use --backend gloo, or leave it out"
        )
    if asked != "auto":
        slow = "; slower than nccl between GPUs" if on_gpu and asked == "gloo" else ""
        return Choice(asked, f"asked for by --backend {asked}{slow}")
    if on_gpu:
        return Choice("nccl", "the workers have GPUs", (Rejected("gloo", "sums in host memory"),))
    return Choice("gloo", "the workers train on CPUs", (Rejected("nccl", "works between GPUs only"),))


def choose_sharding(
    config: Config, facts: ModelFacts, workers: int, limit: float, on_gpu: bool
) -> Choice[ShardingForm]:
    """Whether parameters, gradients and optimizer state are whole on every worker, or divided: as little as lets one sample
    in. Document 003 divides for any two GPUs; we do where memory is short, as it costs speed where it is not. Recomputing
    activations is tried first, in that document's order."""
    check_cpu(config, on_gpu)
    asked, offload = config.parallel.sharding, config.parallel.cpu_offload
    if asked != "auto":
        return Choice(asked, f"asked for by --sharding {asked}")
    if workers == 1 and not offload:
        return Choice("none", "one worker has nobody to share with")
    if not on_gpu:
        return Choice(
            "none",
            "the workers train on CPUs and share the host's memory",
            (Rejected("zero2", "try --sharding zero2"),),
        )
    if not config.run.auto and not offload:
        return Choice("none", PLAIN)
    return _least_sharding(config, facts, workers, limit)


def check_cpu(config: Config, on_gpu: bool) -> None:
    """Refuse what torch can do on GPUs only."""
    instead = "leave it out, or use --gpu-mode multi_gpu where there are some"
    for flag, given in (
        ("--cpu-offload", config.parallel.cpu_offload),
        ("--sync-batchnorm", config.parallel.sync_batchnorm),
    ):
        if given and not on_gpu:
            raise UserError(f"{flag} works for workers with GPUs, and these train on CPUs; {instead}")


def _least_sharding(config: Config, facts: ModelFacts, workers: int, limit: float) -> Choice[ShardingForm]:
    offload = config.parallel.cpu_offload
    forms = _FORMS[1:] if offload else _FORMS
    needs = {
        form: one_sample_memory(config, facts, limit, ModelSharding(workers, form, offload)) for form in forms
    }
    if "none" in needs and needs["none"].fits:
        why = "costs speed where memory is not short (document 003 turns it on for any two GPUs)"
        text = f"whole on every worker, one sample needs {bytes_text(needs['none'].total)} of the {bytes_text(limit)} that may be used"
        return Choice(
            "none",
            text,
            (Rejected("zero2", why), Rejected("zero3", "likewise, and gathers parameters in every pass")),
        )
    fitting: list[ShardingForm] = [form for form in forms if needs[form].fits]
    chosen: ShardingForm = fitting[0] if fitting else "zero3"
    weighed = tuple(
        Rejected(
            form,
            f"one sample would need {bytes_text(need.total)}"
            if form < chosen or form == "none"
            else "slower",
        )
        for form, need in needs.items()
        if form != chosen
    )
    need, may = bytes_text(needs[chosen].total), bytes_text(limit)
    if not needs[chosen].fits:
        return Choice(
            chosen,
            f"divided as far as can be: one sample needs {need}, more than the {may} that may be used",
            weighed,
        )
    why = "--cpu-offload needs shards" if offload else "the state does not fit whole on every worker"
    return Choice(chosen, f"{why}; one sample needs {need} of the {may} that may be used", weighed)


def one_sample_memory(
    config: Config, facts: ModelFacts, limit: float, spread: ModelSharding
) -> MemoryEstimate:
    """What one sample needs, its activations recomputed where that is asked for, or where it is allowed and needed."""
    asked = config.device.activation_checkpointing
    plain, recomputed = (estimate_memory(facts, 1, recompute, limit, spread) for recompute in (False, True))
    may = asked == "on" or (asked == "auto" and config.run.auto and not plain.fits)
    return recomputed if may and recomputed.total < plain.total else plain
