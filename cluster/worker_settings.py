"""What one rank is told before it starts. Imports no torch, so that whoever launches workers can build it."""

from __future__ import annotations

import dataclasses

from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.config import ConnectorConfig
from blockferry.engine.worker.spec import WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One rank of one instance."""

    instance_id: str
    spec: WorkerSpec
    connector: ConnectorConfig | None  # None: this deployment ferries nothing
    deployment: str = ""  # its name
    hosts: Hosts = Hosts.MANY  # that this rank's peers may be on
