"""What the router and `blockferry status` see of an instance. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blockferry.engine.config import Role
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.handoff import Handoff, HandoffState
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.membership import Member
from blockferry.engine.scheduler.outputs import InstanceLoad


def load(instance: Instance) -> InstanceLoad:
    """How busy an instance is at this moment."""
    return InstanceLoad(
        num_queued_tokens=instance.num_queued_tokens(),
        num_missing_tokens=instance.num_missing_tokens(),
        num_waiting=len(instance.queue),
        num_running=instance.batch.num_occupied,
        num_free_blocks=instance.kv.num_free_blocks,
        num_usable_blocks=instance.kv.num_usable_blocks,
        num_cached_keys=instance.kv.stats().num_keys,
    )


def status(member: Member) -> dict[str, Any]:
    """An instance as plain values."""
    instance = member.instance
    ledger = instance.kv.stats()
    return {
        "instance_id": instance.instance_id,
        "role": instance.role.value,
        "num_ranks": instance.num_ranks,
        "state": member.state.value,
        "is_wanted": member.is_wanted,
        "failure": member.failure,
        "num_waiting": len(instance.queue),
        "num_queued_tokens": instance.num_queued_tokens(),
        "rows": {phase.name.lower(): len(instance.batch.rows_in(phase)) for phase in Phase},
        "num_running": instance.batch.num_occupied,
        "num_steps": instance.last_step + 1,
        "num_steps_in_flight": len(instance.in_flight),
        "num_preemptions": instance.num_preemptions,
        "num_blocks": ledger.num_blocks,
        "num_free_blocks": ledger.num_free_blocks,
        "usage": round(instance.kv.usage, 6),
        "num_queried_tokens": ledger.num_queried_tokens,
        "num_hit_tokens": ledger.num_hit_tokens,
        "num_cached_keys": ledger.num_keys,
        "num_evicted_blocks": ledger.num_evicted_blocks,
        "tiers": dict(instance.tiers.status()),
        "speculation": speculation(instance),
    }


def speculation(instance: Instance) -> dict[str, Any] | None:
    """What became of drafts; None where none is ever made. A row's verifications are drafted_per_position[0]."""
    counters = instance.speculation.counters()
    if counters is None:
        return None
    return {
        "num_steps": counters.num_steps,
        "num_drafted": counters.num_drafted,
        "num_accepted": counters.num_accepted,
        "drafted_per_position": list(counters.drafted_per_position),
        "accepted_per_position": list(counters.accepted_per_position),
    }


def count_prefix_hits(instances: Iterable[Instance]) -> dict[str, int | float]:
    """Prompt tokens of the deployment that were looked up, and found or loaded, where prompts are computed."""
    computing = [instance for instance in instances if instance.role is not Role.DECODE]
    ledgers = [instance.kv.stats() for instance in computing]
    num_queried_tokens = sum(ledger.num_queried_tokens for ledger in ledgers)
    num_loaded_tokens = sum(int(instance.tiers.status().get("num_loaded_tokens", 0)) for instance in computing)
    num_hit_tokens = sum(ledger.num_hit_tokens for ledger in ledgers) + num_loaded_tokens
    return {
        "num_queried_tokens": num_queried_tokens,
        "num_hit_tokens": num_hit_tokens,
        "hit_rate": round(num_hit_tokens / num_queried_tokens, 6) if num_queried_tokens else 0.0,
    }


def count_handoffs(handoffs: Iterable[Handoff]) -> dict[str, int]:
    """Number of hand-offs by state."""
    counts = dict.fromkeys((state.value for state in HandoffState), 0)
    for handoff in handoffs:
        counts[handoff.state.value] += 1
    return counts
