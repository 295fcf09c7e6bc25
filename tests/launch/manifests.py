"""KubeRay manifests against the schema of their resource, and the parts of them that tests look at."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

from orchestrator.launch.files import file_text
from orchestrator.launch.launch import Launch, LaunchOptions

SCHEMA = Path(__file__).with_name("rayjob.schema.json")


def manifest(options: LaunchOptions, *flags: str) -> dict[str, Any]:
    """Return the manifest that is written for these options, after a check against the schema."""
    content, _ = yaml.safe_load_all(file_text(Launch(options, flags)))
    check_manifest(content)
    return content


def network_policy(options: LaunchOptions, *flags: str) -> dict[str, Any]:
    """Return the network policy that is written with the manifest of a run with these flags."""
    _, policy = yaml.safe_load_all(file_text(Launch(options, flags)))
    return policy


def check_manifest(content: dict[str, Any]) -> None:
    """Raise ValidationError for a value of a wrong type, a missing field or an unknown one."""
    error = best_match(_validator(content["kind"]).iter_errors(content))
    if error is not None:
        raise error


@cache
def _validator(kind: str) -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    if kind == "RayCluster":
        spec = schema["properties"]["spec"]["properties"]["rayClusterSpec"]
        schema["properties"]["spec"] = spec
    strict = _without_unknown_fields(schema)
    validator = validator_for(strict)
    validator.check_schema(strict)
    return validator(strict)


def _without_unknown_fields(schema: Any) -> Any:
    """Return a schema that refuses fields it does not list, as ``kubectl`` does."""
    if isinstance(schema, list):
        return [_without_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _without_unknown_fields(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        strict["additionalProperties"] = False
    return strict


def cluster_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["spec"].get("rayClusterSpec", content["spec"])


def pods(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs of the head and of the groups of workers."""
    cluster = cluster_of(content)
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [group["template"]["spec"] for group in groups]


def gpus(pod: dict[str, Any]) -> int:
    limits = pod["containers"][0]["resources"]["limits"]
    return int(limits.get("nvidia.com/gpu", 0))
