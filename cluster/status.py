"""The state of running deployments, read from their scheduler actors by name: from any shell, on any node."""

from __future__ import annotations

from typing import Any

import ray

from blockferry.cluster import ray_session, run_record
from blockferry.cluster.ray_session import NAMESPACE, RaySessionError

ANSWER_TIMEOUT_S = 10.0
_SUFFIX = ":scheduler"


def deployments_here() -> list[dict[str, Any]]:
    """Snapshots of the deployments that this machine's shells brought up. Raises RaySessionError."""
    found = []
    for record in run_record.read_records():
        for snapshot in deployments_at(record.ray_address, auth_mode=record.ray_auth_mode):
            if snapshot["deployment"] == record.name:
                found.append(snapshot | {"url": record.url, "pid": record.pid})
    return found


def deployments_at(address: str, *, auth_mode: str = "") -> list[dict[str, Any]]:
    """Snapshots of every deployment on a Ray cluster; "auto" is the one of this machine. Raises RaySessionError."""
    session = ray_session.connect(address, auth_mode=auth_mode)
    try:
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in named if one["namespace"] == NAMESPACE and one["name"].endswith(_SUFFIX)]
        schedulers = [ray.get_actor(name, namespace=NAMESPACE) for name in sorted(names)]
        calls = [scheduler.status.remote() for scheduler in schedulers]
        try:
            snapshots: list[dict[str, Any]] = ray.get(calls, timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise RaySessionError(f"a scheduler at {address} did not answer within {ANSWER_TIMEOUT_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise RaySessionError(f"a scheduler at {address} failed: {str(error).splitlines()[0]}") from None
    finally:
        session.close()
    # a scheduler that is still starting has nothing to show yet
    return [{"url": "", "pid": 0} | snapshot for snapshot in snapshots if snapshot]
