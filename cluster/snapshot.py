"""What the scheduler loop shows of itself: the scheduler's status, completed by what the loop knows of processes.

Pure; /health, /metrics, `blockferry status` and the supervisor read it.

    state of an instance     starting | serving | draining | drained | failed
    healthy                  every instance that is wanted serves
    is_serving               new requests can be run, be it with fewer instances than are wanted
"""

from __future__ import annotations

from typing import Any

from blockferry.cluster.health import HealthBoard
from blockferry.engine.scheduler.membership import MemberState


def complete(status: dict[str, Any], health: HealthBoard, *, now_s: float) -> None:
    """Add to CentralScheduler.status() what heartbeats say of its instances, and the verdict on the deployment."""
    entries = status["instances"]
    for entry in entries:
        if entry["state"] == MemberState.SERVING and not health.has_all_ranks(entry["instance_id"]):
            entry["state"] = "starting"
        entry["reason"] = entry["failure"]
        entry["last_beat_s"] = health.silent_s(entry["instance_id"], now_s=now_s)
        # the names that /metrics reads
        entry["kv_cache_usage"] = entry["usage"]
        entry["prefix_cache_queries"] = entry["num_queried_tokens"]
        entry["prefix_cache_hits"] = entry["num_hit_tokens"]
        entry.update({f"offload_{key}": value for key, value in entry["tiers"].items()})
        entry.update(_draft_sums(entry.get("speculation")))
    wanted = [entry for entry in entries if entry["is_wanted"]]
    status["healthy"] = all(entry["state"] == MemberState.SERVING for entry in wanted)
    status["reason"] = "; ".join(
        f"instance {entry['instance_id']}: {entry['reason']}" for entry in wanted if entry["reason"]
    )


def _draft_sums(counts: dict[str, Any] | None) -> dict[str, int]:
    """None: the instance drafts nothing."""
    if counts is None:
        return {}
    drafted, accepted = counts["drafted_per_position"], counts["accepted_per_position"]
    return {
        "speculation_num_drafts": drafted[0],
        "speculation_num_drafted": sum(drafted),
        "speculation_num_accepted": sum(accepted),
    }
