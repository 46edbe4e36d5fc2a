"""Whose request is whose: client handles to deployment-wide ones and back, and outputs gathered per client.

Owned by the scheduler loop's thread. Knows no sockets: take_batches() says what to send to whom.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from blockferry.cluster.messages import HandleLogprobs, OutputBatch
from blockferry.engine.scheduler.outputs import Finished, Route
from blockferry.engine.wire import RowLogprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The client side of one unfinished request."""

    client: bytes
    client_handle: int
    route: Route


class ClientTable:
    """Every unfinished request of every client."""

    def __init__(self) -> None:
        self._next_handle = itertools.count(1)
        self._owners: dict[int, Owner] = {}
        self._handles: dict[bytes, dict[int, int]] = {}  # client -> client handle -> handle
        self._batches: dict[bytes, OutputBatch] = {}
        self._num_assigned: dict[str, int] = {}

    @property
    def clients(self) -> list[bytes]:
        """Everybody who has said hello."""
        return list(self._handles)

    def greet(self, client: bytes) -> None:
        """Remember a client; idempotent."""
        self._handles.setdefault(client, {})

    def open(self, client: bytes, client_handle: int, route: Route) -> int:
        """Start a request and return its deployment-wide handle. Raises ValueError for a handle in use."""
        handles = self._handles.setdefault(client, {})
        if client_handle in handles:
            raise ValueError(f"handle {client_handle} belongs to an unfinished request; use a new one")
        handle = next(self._next_handle)
        handles[client_handle] = handle
        self._owners[handle] = Owner(client=client, client_handle=client_handle, route=route)
        for instance_id in {route.prefill, route.decode}:
            self._num_assigned[instance_id] = self._num_assigned.get(instance_id, 0) + 1
        return handle

    def close(self, handle: int) -> None:
        """Forget a request; idempotent."""
        owner = self._owners.pop(handle, None)
        if owner is None:
            return
        self._handles[owner.client].pop(owner.client_handle, None)
        for instance_id in {owner.route.prefill, owner.route.decode}:
            self._num_assigned[instance_id] -= 1
            if not self._num_assigned[instance_id]:  # it may be one that left after it had done its part
                del self._num_assigned[instance_id]

    def find(self, client: bytes, client_handle: int) -> int | None:
        """Deployment-wide handle of a client's request; None when it is unknown or finished."""
        return self._handles.get(client, {}).get(client_handle)

    def num_assigned(self, instance_id: str) -> int:
        """Unfinished requests that prefill or decode on an instance."""
        return self._num_assigned.get(instance_id, 0)

    def leave(self, client: bytes) -> list[int]:
        """Forget a client that is gone; returns the handles of its unfinished requests, to be aborted."""
        self._batches.pop(client, None)
        handles = list(self._handles.get(client, {}).values())
        for handle in handles:
            self.close(handle)
        self._handles.pop(client, None)
        return handles

    def tokens(self, handles: Iterable[int], token_ids: Iterable[int]) -> None:
        """Gather one token for each handle, of which any may repeat; tokens of forgotten requests are dropped."""
        for handle, token_id in zip(handles, token_ids, strict=True):
            owner = self._owners.get(handle)
            if owner is not None:
                batch = self._batch(owner.client)
                batch.handles.append(owner.client_handle)
                batch.token_ids.append(token_id)

    def logprobs(self, handle: int, logprobs: RowLogprobs) -> None:
        """Gather log probabilities of a request."""
        owner = self._owners.get(handle)
        if owner is not None:
            entry = HandleLogprobs(handle=owner.client_handle, logprobs=logprobs)
            self._batch(owner.client).logprobs.append(entry)

    def finish(self, finished: Finished) -> None:
        """Gather the end of a request and forget it."""
        owner = self._owners.get(finished.handle)
        if owner is not None:
            named = dataclasses.replace(finished, handle=owner.client_handle)
            self._batch(owner.client).finished.append(named)
            self.close(finished.handle)

    def take_batches(self) -> dict[bytes, OutputBatch]:
        """What each client has to be told since the last take."""
        batches, self._batches = self._batches, {}
        return batches

    def _batch(self, client: bytes) -> OutputBatch:
        return self._batches.setdefault(client, OutputBatch())
