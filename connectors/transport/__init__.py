"""Transports: one-sided reads and writes between registered memory regions. UCX loads when it is first opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from blockferry.connectors.base import Transport
from blockferry.connectors.transport.hosts import Hosts, ucx_transports


def open_ucx(options: Mapping[str, str] | None = None, *, hosts: Hosts, net_device: str = "") -> Transport:
    """A UcxTransport; `options` are UCX's own by their names without UCX_, TLS among them. Raises TransportError."""
    ucx = importlib.import_module("blockferry.connectors.transport.ucx")
    options = options or {}
    transports = options["TLS"].split(",") if "TLS" in options else ucx_transports(hosts)
    settings = ucx.UcxOptions(transports=tuple(transports), net_device=net_device, extra=options)
    transport: Transport = ucx.UcxTransport(settings)
    return transport
