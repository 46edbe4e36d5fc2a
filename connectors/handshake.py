"""The handshake: what a rank tells its peers about its pool, and the refusal of pools that do not fit.

Owns the bytes of a PoolEndpoint (msgpack with a version) and the rules of compatibility. Opens no connection.
Block size, layout order, TP and PP may differ between two pools; what would change the meaning of bytes may not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgpack

from blockferry.connectors.base import HandshakeRefused, PoolEndpoint, PoolLayout
from blockferry.connectors.layout import strides

HANDSHAKE_VERSION = 1


def encode_endpoint(endpoint: PoolEndpoint) -> bytes:
    """A PoolEndpoint as bytes, to be carried to peers by any channel."""
    packed: bytes = msgpack.packb([HANDSHAKE_VERSION, dataclasses.asdict(endpoint)])
    return packed


def decode_endpoint(data: bytes) -> PoolEndpoint:
    """What encode_endpoint made. Raises HandshakeRefused for another version or for anything else."""
    try:
        version, value = msgpack.unpackb(data)
    except (ValueError, TypeError) as error:
        raise HandshakeRefused(f"endpoint of {len(data)} bytes is not a Blockferry handshake: {error}") from error
    if version != HANDSHAKE_VERSION:
        raise HandshakeRefused(
            f"handshake version {version} of the peer is not {HANDSHAKE_VERSION}; run one release everywhere"
        )
    try:
        layout = value["layout"]
        layout["layer_ids"] = tuple(layout["layer_ids"])
        return PoolEndpoint(**(value | {"layout": PoolLayout(**layout)}))
    except (KeyError, TypeError) as error:
        raise HandshakeRefused(f"handshake of version {version} with fields that do not fit: {error}") from error


def check_compatible(own: PoolEndpoint, peer: PoolEndpoint) -> None:
    """Raises HandshakeRefused, naming the field and both values, when bytes of one mean nothing to the other."""
    if own.instance_id == peer.instance_id:
        raise HandshakeRefused(f"instance_id={own.instance_id!r} on both sides; a transfer joins two instances")
    pairs = {
        "transport": (own.transport, peer.transport),
        "model_fingerprint": (own.model_fingerprint, peer.model_fingerprint),
        "dtype": (own.layout.dtype, peer.layout.dtype),
        "content_bytes": (own.layout.content_bytes, peer.layout.content_bytes),
    }
    for field, (here, there) in pairs.items():
        if here != there:
            raise HandshakeRefused(
                f"{field}={there!r} of {describe(peer)} differs from {here!r} of {describe(own)}; "
                "both instances must serve the same model with the same cache type"
            )
    _check_order(own)
    _check_order(peer)


def check_coverage(own: PoolEndpoint, peers: Sequence[PoolEndpoint]) -> None:
    """Raises HandshakeRefused unless the ranks of one peer instance together store every layer and head of `own`."""
    wanted = _cells(own)
    stored: set[tuple[int, int]] = set()
    for peer in peers:
        stored |= _cells(peer)
    missing = sorted(wanted - stored)
    if missing:
        layers = sorted({layer_id for layer_id, _ in missing})
        heads = sorted({head for _, head in missing})
        raise HandshakeRefused(
            f"layer_ids {layers} with KV heads {heads} of {describe(own)} are stored by no rank of instance "
            f"{peers[0].instance_id if peers else '(none)'!r}; connect every rank of it at once"
        )


def describe(endpoint: PoolEndpoint) -> str:
    """How messages name a rank."""
    return f"{endpoint.instance_id}[tp {endpoint.tp_rank}, pp {endpoint.pp_rank}]"


def local_host_id() -> str:
    """Equal for processes that can share memory: same boot, same PID namespace, same /dev/shm."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    shared = os.stat("/dev/shm")
    return hashlib.sha256(f"{boot_id} {namespace} {shared.st_dev}".encode()).hexdigest()[:16]


def _cells(endpoint: PoolEndpoint) -> set[tuple[int, int]]:
    """(layer, head) pairs that a rank stores."""
    layout = endpoint.layout
    heads = range(layout.head_start, layout.head_start + layout.num_heads)
    return {(layer_id, head) for layer_id in layout.layer_ids for head in heads}


def _check_order(endpoint: PoolEndpoint) -> None:
    try:
        strides(endpoint.layout)
    except ValueError as error:
        raise HandshakeRefused(f"order of {describe(endpoint)}: {error}") from error
