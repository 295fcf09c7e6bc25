"""Groups of expert hosts that each hold every expert, for any number of hosts. Pure."""

from __future__ import annotations

import math

from orchestrator.config.settings import Config
from orchestrator.plan.compute import with_memory_settings
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.planning import Plan
from orchestrator.types import Choice, bytes_text


def hosts_of_group(plan: Plan) -> int:
    """Return the number of hosts that together hold every expert once, as planned."""
    return max(1, plan.workers.value // plan.expert_replicas.value)


def expert_memory(limit: float | None, plan: Plan, facts: ModelFacts) -> float:
    """Return the bytes that a host has for experts: the limit less the dense part and the activations."""
    if limit is None:
        return math.inf
    return max(0.0, limit - (plan.memory.total - _most_expert_bytes(facts, hosts_of_group(plan))))


def groups_on(config: Config, plan: Plan, facts: ModelFacts, num_hosts: int) -> Choice[int]:
    """Choose the groups for the hosts that a run has now, after a loss or with those that came back.

    It is the planned number where it divides the hosts, else the largest number below that does. Where
    smaller groups would leave a host more experts than fit into its memory, there are fewer groups. One
    group is always chosen rather than none: the placement says what is missing."""
    planned = plan.expert_replicas
    if num_hosts == plan.workers.value or planned.value == 1:
        return planned
    facts = with_memory_settings(config, facts)
    room = expert_memory(plan.memory.limit, plan, facts)
    dividing = [groups for groups in range(planned.value, 0, -1) if num_hosts % groups == 0]
    fitting = [groups for groups in dividing if _most_expert_bytes(facts, num_hosts // groups) <= room]
    groups = fitting[0] if fitting else 1
    if groups == planned.value:
        why = f"as --expert-replicas {planned.value} asks"
    elif groups == dividing[0]:
        why = f"{planned.value} groups of equal size cannot be made of {num_hosts} hosts"
    else:
        needed = bytes_text(_most_expert_bytes(facts, num_hosts // dividing[0]))
        why = f"in {dividing[0]} groups a host would need {needed} for experts and has {bytes_text(room)}"
    most = -(-facts.experts // (num_hosts // groups))
    before = -(-facts.experts // hosts_of_group(plan))
    return Choice(
        groups, f"{why}; a host holds up to {most} of {facts.experts} experts of a layer, {before} as planned"
    )


def _most_expert_bytes(facts: ModelFacts, group_size: int) -> float:
    """Return the bytes of the experts on the host of a group that has the most of them."""
    share = -(-facts.experts // group_size) / max(1, facts.experts)
    return facts.expert_state_bytes * facts.expert_parameters * share
