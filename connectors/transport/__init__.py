"""Transports: one-sided reads and writes between registered memory regions. UCX loads when it is first opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from blockferry.connectors.base import Transport


def open_ucx(options: Mapping[str, str] | None = None, *, net_device: str = "") -> Transport:
    """A UcxTransport; `options` are UCX's own by their names without UCX_. Raises TransportError."""
    ucx = importlib.import_module("blockferry.connectors.transport.ucx")
    transport: Transport = ucx.UcxTransport(ucx.UcxOptions(net_device=net_device, extra=options or {}))
    return transport
