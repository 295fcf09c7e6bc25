"""KubeRay manifests: a RayJob that trains once, and a RayCluster for several runs.

Workers run on pods with all GPUs of a node. The head has none, so that a lost spot node never takes the
driver along; where one node is enough, the head is that node. A network policy comes with them: gloo, NCCL
and torch's rendezvous store ask no one for a password.
"""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

from orchestrator.launch.launch import Launch
from orchestrator.launch.yaml_text import yaml_text

RAY_VERSION = "2.60.0"
TOKEN_SECRET = "ray-token"
STORAGE_SECRET = "storage-credentials"
_DEFAULT_CLAIM = "training-runs"
_CLUSTER_LABEL = "expert-orchestrator/cluster"
_DASHBOARD_PORT = 8265
_USER = 1000
"""The user of cluster/Dockerfile."""
_HEAD_CPUS = 4
_HEAD_MEMORY_GIB = 16
_ATTEMPTS = 3
_KEEP_S = 600
"""Life of the pods after the end of a job: time to read their logs."""
_STOP_S = 120
"""Time that a run has for its last checkpoint, when its job is stopped."""
_SPOT_TAINTS = (
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
)
"""Taints of spot nodes on GKE, on AKS, and as node groups of EKS with Karpenter are often given."""


def ray_job(launch: Launch) -> str:
    name = launch.options.name
    command = shlex.join(launch.train_command())
    spec = {
        # A run with an address works in the current folder, which all nodes must share.
        "entrypoint": f"cd {shlex.quote(launch.shared_folder)} && exec {command}",
        "runtimeEnvYAML": f"env_vars:\n  RAY_JOB_STOP_WAIT_TIME_S: '{_STOP_S}'\n",
        # A new attempt starts a new cluster; --resume auto continues from the newest checkpoint.
        "backoffLimit": _ATTEMPTS,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEEP_S,
        "rayClusterSpec": _cluster_spec(launch),
    }
    comment = [
        *_comment(launch),
        "Start: kubectl apply -f FILE",
        f"Follow: kubectl logs -f job/{name}; end: kubectl delete -f FILE",
    ]
    return yaml_text(comment, _resource("RayJob", name, spec), _network_policy(launch))


def ray_cluster(launch: Launch) -> str:
    name = launch.options.name
    script = f"cd {shlex.quote(launch.shared_folder)} && exec {shlex.join(launch.train_command())}"
    comment = [
        *_comment(launch),
        f"Start: kubectl apply -f FILE; reach it: kubectl port-forward service/{name}-head-svc 8265",
        f"Train: ray job submit --address http://localhost:8265 -- bash -c {shlex.quote(script)}",
    ]
    cluster = _resource("RayCluster", name, _cluster_spec(launch))
    return yaml_text(comment, cluster, _network_policy(launch))


def _comment(launch: Launch) -> list[str]:
    claim = f", the claim {_claim(launch)}" if launch.needs_storage else ""
    return [
        f"Written by: {launch.launch_command()}",
        f"Needs KubeRay 1.6 or later, the secret {TOKEN_SECRET}{claim}: docs/clusters.md creates them.",
    ]


def _claim(launch: Launch) -> str:
    return launch.options.storage or _DEFAULT_CLAIM


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _network_policy(launch: Launch) -> dict[str, Any]:
    """Return the policy by which the pods of a cluster accept connections of each other alone.

    KubeRay's operator and the pod that submits a job come from outside, to the dashboard, which asks for
    the token; Prometheus comes to the port of --metrics-port. KubeRay's own field for this needs 1.7 and a
    feature gate."""
    name = launch.options.name
    pods = {"matchLabels": {_CLUSTER_LABEL: name}}
    # --metrics-port 9400 or --metrics-port=9400; 0 is a port that nobody knows before the run.
    words = [word for flag in launch.flags for word in flag.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag == "--metrics-port"]
    open_ports = [_DASHBOARD_PORT, *(int(port) for port in given[-1:] if port != "0")]
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": pods}]},
            {
                "from": [{"namespaceSelector": {}}],
                "ports": [{"protocol": "TCP", "port": port} for port in open_ports],
            },
        ],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def _cluster_spec(launch: Launch) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token", "secretName": TOKEN_SECRET},
        "headGroupSpec": _head_group(launch),
    }
    if launch.nodes > 1:
        spec["workerGroupSpecs"] = [_worker_group(launch)]
    return spec


def _head_group(launch: Launch) -> dict[str, Any]:
    if launch.nodes == 1:
        return {"rayStartParams": {}, "template": _training_pod(launch, "ray-head")}
    resources = {"cpu": str(_HEAD_CPUS), "memory": f"{_HEAD_MEMORY_GIB}Gi"}
    # No CPU is declared, so that no worker is placed beside the driver.
    return {"rayStartParams": {"num-cpus": "0"}, "template": _pod(launch, "ray-head", resources)}


def _worker_group(launch: Launch) -> dict[str, Any]:
    return {
        "groupName": "workers",
        "replicas": launch.nodes,
        "minReplicas": launch.nodes,
        "maxReplicas": launch.nodes,
        "rayStartParams": {},
        "template": _training_pod(launch, "ray-worker"),
    }


def _training_pod(launch: Launch, container: str) -> dict[str, Any]:
    resources = {"cpu": str(launch.cpus_on_node), "memory": f"{launch.memory_on_node_gib}Gi"}
    tolerations: list[dict[str, str]] = []
    if launch.options.gpus_per_node:
        resources["nvidia.com/gpu"] = str(launch.options.gpus_per_node)
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if launch.options.spot:
        tolerations += [_toleration(key, value) for key, value in _SPOT_TAINTS]
    pod = _pod(launch, container, resources)
    if tolerations:
        pod["spec"]["tolerations"] = tolerations
    return pod


def _toleration(key: str, value: str) -> dict[str, str]:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def _pod(launch: Launch, name: str, resources: dict[str, str]) -> dict[str, Any]:
    """Return a pod without root rights, with equal requests and limits, so that it is evicted last."""
    container: dict[str, Any] = {
        "name": name,
        "image": launch.options.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "runs", "mountPath": launch.shared_folder}],
    }
    if launch.address:
        container["envFrom"] = [{"secretRef": {"name": STORAGE_SECRET, "optional": True}}]
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [_volume(launch)],
    }
    return {"metadata": {"labels": {_CLUSTER_LABEL: launch.options.name}}, "spec": spec}


def _volume(launch: Launch) -> dict[str, Any]:
    if launch.needs_storage:
        return {"name": "runs", "persistentVolumeClaim": {"claimName": _claim(launch)}}
    return {"name": "runs", "emptyDir": {}}
