"""Ends of `bench transfer` on the nodes of a Ray cluster, and the nodes as a user names them.

Owns the actors that it starts; close() ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from blockferry.cluster.actors import TransferEndActor, worker_environment
from blockferry.cluster.bench.transfer_links import ANSWER_TIMEOUT_S, STOP_TIMEOUT_S, Answer, Ends
from blockferry.cluster.interrupt import stop_signals
from blockferry.connectors.base import TransportError

MIN_PREFIX = 4  # characters of a node id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of the cluster."""

    node_id: str
    hostname: str
    address: str

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address}, id {self.node_id[:8]})"


def cluster_nodes() -> list[ClusterNode]:
    """The live nodes of the connected cluster."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own signature
    return [
        ClusterNode(node_id=node["NodeID"], hostname=node["NodeManagerHostname"], address=node["NodeManagerAddress"])
        for node in nodes
        if node["Alive"]
    ]


def find_node(nodes: Sequence[ClusterNode], wanted: str, *, option: str) -> ClusterNode:
    """The one node with this hostname, address or beginning of its id. Raises ValueError that lists the nodes."""
    found = [
        node
        for node in nodes
        if wanted in (node.hostname, node.address)
        or (len(wanted) >= MIN_PREFIX and node.node_id.startswith(wanted.lower()))
    ]
    if len(found) == 1:
        return found[0]
    what = f"means {len(found)} nodes" if found else "is no node"
    raise ValueError(f"{option}={wanted!r} {what} of this cluster; its nodes: {', '.join(map(str, nodes)) or 'none'}")


def open_actors(src: Sequence[ClusterNode], dst: Sequence[ClusterNode]) -> Ends:
    """Ends as actors of the connected Ray cluster: one on each node named, once for every rank."""
    links = [_ActorLink(node) for node in (*src, *dst)]
    return Ends(src=links[: len(src)], dst=links[len(src) :])


class _ActorLink:
    """An actor on a given node."""

    def __init__(self, node: ClusterNode) -> None:
        self._name = f"end on {node.hostname}"
        actor = ray.remote(TransferEndActor).options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            runtime_env={"env_vars": worker_environment(1)},
        )
        self._actor: Any = actor.remote()

    def ask(self, verb: str, *arguments: Any) -> Answer:
        reference = self._actor.answer.remote(verb, arguments)
        return lambda: self._answer(verb, reference)

    def _answer(self, verb: str, reference: Any) -> Any:
        stop_signals.check()
        try:
            return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise TransportError(f"the {self._name} did not answer {verb!r} within {ANSWER_TIMEOUT_S:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise TransportError(f"the {self._name} failed in {verb!r}: {error.cause or error}") from None
        except ray.exceptions.RayError as error:
            raise TransportError(f"the {self._name} is gone, in {verb!r}: {_first_line(error)}") from None

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.wait([self._actor.__ray_terminate__.remote()], timeout=STOP_TIMEOUT_S)
            ray.kill(self._actor)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
