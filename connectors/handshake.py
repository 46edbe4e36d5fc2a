"""The handshake: what a rank tells its peers about its pool, and the refusal of pools that do not fit.

Owns the bytes of a PoolEndpoint (msgpack with a version) and the rules of compatibility. Opens no connection.
Block size, layout order, TP, PP and the cache groups that layers are in may differ between two pools; what would change
the meaning of bytes may not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgpack

from blockferry.connectors import typed_maps
from blockferry.connectors.base import HandshakeRefused, PoolEndpoint, PoolLayout
from blockferry.connectors.layout import strides

HANDSHAKE_VERSION = 4


def encode_endpoint(endpoint: PoolEndpoint) -> bytes:
    """A PoolEndpoint as bytes, to be carried to peers by any channel."""
    packed: bytes = msgpack.packb([HANDSHAKE_VERSION, dataclasses.asdict(endpoint)])
    return packed


def decode_endpoint(data: bytes) -> PoolEndpoint:
    """What encode_endpoint made. Raises HandshakeRefused for another version or for anything else."""
    try:
        version, value = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError) as error:
        raise HandshakeRefused(f"endpoint of {len(data)} bytes is not a Blockferry handshake: {error}") from error
    if version != HANDSHAKE_VERSION:
        raise HandshakeRefused(
            f"handshake version {version!r} of the peer is not {HANDSHAKE_VERSION}; run one release everywhere"
        )
    try:
        return typed_maps.read(PoolEndpoint, value)
    except ValueError as error:
        raise HandshakeRefused(f"handshake of version {version} with fields that do not fit: {error}") from error


def with_common_scales(endpoints: Sequence[bytes]) -> list[bytes]:
    """Endpoints of all ranks that exchange blocks, each layer and KV head with the largest scale that any has for it.

    Ranks that share a model otherwise sum in another order, so a calibrated scale may come out as the next power of
    two; the larger one fits the values of both. Every rank must take the scales of its new endpoint.
    """
    return with_scales_of(endpoints, endpoints)


def with_scales_of(known: Sequence[bytes], endpoints: Sequence[bytes]) -> list[bytes]:
    """Endpoints with the largest scales that ranks in `known` have, of which some instance must be there as a whole.

    For ranks that join later: what the others have cached is scaled already, so theirs must not change.
    """
    largest: dict[_Cell, tuple[float, float]] = {}
    for endpoint in map(decode_endpoint, known):
        for layout in endpoint.layouts:
            for cell, (k_scale, v_scale) in _scales(layout).items():
                largest_k, largest_v = largest.get(cell, (0.0, 0.0))
                largest[cell] = max(largest_k, k_scale), max(largest_v, v_scale)
    return [
        encode_endpoint(
            dataclasses.replace(endpoint, layouts=tuple(_rescaled(layout, largest) for layout in endpoint.layouts))
        )
        for endpoint in map(decode_endpoint, endpoints)
    ]


def check_compatible(own: PoolEndpoint, peer: PoolEndpoint) -> None:
    """Raises HandshakeRefused, naming the field and both values, when bytes of one mean nothing to the other."""
    if own.instance_id == peer.instance_id:
        raise HandshakeRefused(f"instance_id={own.instance_id!r} on both sides; a transfer joins two instances")
    _check_equal(
        _Difference(own=own, peer=peer),
        {
            "transport": (own.transport, peer.transport),
            "model_fingerprint": (own.model_fingerprint, peer.model_fingerprint),
        },
    )
    _check_order(own)
    _check_order(peer)
    for mine in own.layouts:
        for theirs in peer.layouts:
            shared = tuple(layer_id for layer_id in mine.layer_ids if layer_id in theirs.layer_ids)
            if shared and mine.field == theirs.field:
                _check_layouts(_Difference(own=own, peer=peer, layer_ids=shared), mine, theirs)


def check_coverage(own: PoolEndpoint, peers: Sequence[PoolEndpoint]) -> None:
    """Raises HandshakeRefused unless the ranks of one peer instance together store every layer and head of `own`.

    Of several copies, that one which `own` exchanges (see choose_shares) must be there.
    """
    stored: dict[_Part, list[_Units]] = {}
    for peer in peers:
        for part, units in _parts(layout for layout in peer.layouts if own.tp_rank % layout.num_copies == layout.copy):
            stored.setdefault(part, []).append(units)
    missing = {
        part: first for part, units in _parts(own.layouts) if (first := _first_missing(units, stored.get(part, ())))
    }
    if missing:
        part, first = next(iter(missing.items()))
        what = f"{part.field} unit" if part.field else "KV head"
        raise HandshakeRefused(
            f"layer_ids {sorted({part.layer_id for part in missing})} of {describe(own)} are not stored whole by the "
            f"ranks of instance {peers[0].instance_id if peers else '(none)'!r} (layer {part.layer_id} lacks {what} "
            f"{first.start}); connect every rank of it at once"
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


class _Part(NamedTuple):
    """What the ranks of an instance share among them."""

    layer_id: int
    field: str


class _Units(NamedTuple):
    """Heads, or units of a state's field."""

    start: int
    stop: int


class _Cell(NamedTuple):
    """What has scales of its own."""

    layer_id: int
    head: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Where two endpoints are being compared, for the message."""

    own: PoolEndpoint
    peer: PoolEndpoint
    layer_ids: tuple[int, ...] = ()

    def refuse(self, field: str, here: object, there: object, *, remedy: str) -> NoReturn:
        """Raise the refusal."""
        where = f" of layer_ids {list(self.layer_ids)}" if self.layer_ids else ""
        raise HandshakeRefused(
            f"{field}={there!r}{where} of {describe(self.peer)} differs from {here!r} of {describe(self.own)}; {remedy}"
        )


def _check_layouts(difference: _Difference, mine: PoolLayout, theirs: PoolLayout) -> None:
    """Raises HandshakeRefused unless the layers that both store mean the same."""
    _check_equal(difference, {"content": (str(mine.content), str(theirs.content))})
    _check_equal(
        difference,
        {"dtype": (mine.dtype, theirs.dtype), "content_bytes": (mine.content_bytes, theirs.content_bytes)},
    )
    own_scales, peer_scales = _scales(mine), _scales(theirs)
    for cell in sorted(own_scales.keys() & peer_scales.keys()):
        here, there = own_scales[cell], peer_scales[cell]
        if here != there:
            remedy = "give every rank its endpoint from with_common_scales before it connects"
            difference.refuse(f"scales of layer {cell.layer_id}, KV head {cell.head}", here, there, remedy=remedy)


def _rescaled(layout: PoolLayout, scales: Mapping[_Cell, tuple[float, float]]) -> PoolLayout:
    packed = b"".join(struct.pack("<2f", *scales[cell]) for cell in _scales(layout))
    return dataclasses.replace(layout, scales=packed)


def _scales(layout: PoolLayout) -> dict[_Cell, tuple[float, float]]:
    """K's and V's scale of every layer and head; empty where nothing is scaled."""
    values = zip(struct.iter_unpack("<2f", layout.scales), strict=False)
    cells = (
        _Cell(layer_id, layout.head_start + head) for layer_id in layout.layer_ids for head in range(layout.num_heads)
    )
    return {cell: (k_scale, v_scale) for cell, ((k_scale, v_scale),) in zip(cells, values, strict=False)}


def _check_equal(difference: _Difference, values: Mapping[str, tuple[object, object]]) -> None:
    for field, (here, there) in values.items():
        if here != there:
            remedy = "both instances must serve the same model with the same cache type"
            difference.refuse(field, here, there, remedy=remedy)


def _parts(layouts: Iterable[PoolLayout]) -> Iterator[tuple[_Part, _Units]]:
    """What is stored in them."""
    for layout in layouts:
        for layer_id in layout.layer_ids:
            yield _Part(layer_id, layout.field), _Units(layout.head_start, layout.head_start + layout.num_heads)


def _first_missing(wanted: _Units, stored: Sequence[_Units]) -> _Units | None:
    """What is left of `wanted` from its first unit on that no rank stores; None where nothing is."""
    start = wanted.start
    for units in sorted(stored):
        if units.start <= start:
            start = max(start, units.stop)
    return _Units(start, wanted.stop) if start < wanted.stop else None


def _check_order(endpoint: PoolEndpoint) -> None:
    try:
        for layout in endpoint.layouts:
            strides(layout)
    except ValueError as error:
        raise HandshakeRefused(f"order of {describe(endpoint)}: {error}") from error
