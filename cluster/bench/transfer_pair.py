"""Connected pools on both sides of `bench transfer`, and one measured movement of their blocks at a time.

Owns the ends that it opened in the processes of an Ends, not those processes. Every call waits until it is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from blockferry.cluster.bench.plain_socket import Sending, Timed
from blockferry.cluster.bench.transfer_end import DST, SRC, Opening
from blockferry.cluster.bench.transfer_links import EndLink, Ends, ask_all
from blockferry.cluster.bench.transfer_pools import Blocks, Shape
from blockferry.connectors.base import PoolLayout, TransferCommand, TransferMode, TransportError
from blockferry.connectors.transport.ucx import UcxOptions

GIB = float(1 << 30)
_DEADLINE_S = 60.0
_LEAD_S = 0.02  # between a command and its start where several ranks must start together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One transfer, all ranks together."""

    speed: float  # GiB/s
    cpu_s_per_gib: float  # of the transfer threads of both sides
    block_us: float  # per block of the source


class Pair:
    """Both sides' pools of one shape. open() -> fill() -> transfer(), copy(), send_plain() ... -> close()."""

    def __init__(self, ends: Ends, shape: Shape, options: UcxOptions) -> None:
        self._ends = ends
        self._shape = shape
        self._options = options
        self._number = 0  # of this pair's end in every process
        self._next_id = 1

    def open(self) -> None:
        """Make every rank's pool and connect each to all of the other side."""
        src = self._open(self._ends.src, SRC, self._shape.src, self._shape.dst)
        dst = self._open(self._ends.dst, DST, self._shape.dst, self._shape.src)
        opened = [answer() for answer in (*src, *dst)]
        (self._number,) = {one.number for one in opened}
        endpoints = [one.endpoint for one in opened]
        src_endpoints, dst_endpoints = endpoints[: len(src)], endpoints[len(src) :]
        # both at once: a rank that connects is served by its peers' threads
        connects = [link.ask("connect", self._number, dst_endpoints) for link in self._ends.src]
        connects += [link.ask("connect", self._number, src_endpoints) for link in self._ends.dst]
        for answer in connects:
            answer()

    def _open(
        self, links: Sequence[EndLink], instance_id: str, layouts: Sequence[PoolLayout], peers: tuple[PoolLayout, ...]
    ) -> list[Callable[[], Any]]:
        def opening(rank: int, layout: PoolLayout) -> Opening:
            return Opening(
                instance_id=instance_id,
                rank=rank,
                options=self._options,
                layout=layout,
                peers=peers,
                grid=self._shape.grid,
            )

        return [
            link.ask("open", opening(rank, layout))
            for rank, (link, layout) in enumerate(zip(links, layouts, strict=True))
        ]

    def close(self) -> None:
        """Close the ends; the pools are gone."""
        self._ask(self._ends.all, "close")

    def fill(self, seed: int) -> None:
        """Put a seed's content into the source's pools."""
        self._ask(self._ends.src, "fill", seed)

    def transfer(self, mode: TransferMode, blocks: Blocks, seed: int) -> Moved:
        """Ferry blocks into cleared pools and compare every byte. Raises TransportError."""
        self._ask(self._ends.dst, "clear")
        movers, others = self._sides(mode)
        command = TransferCommand(
            transfer_id=self._next_id,
            mode=mode,
            src_instance_id=SRC,
            dst_instance_id=DST,
            parts=(blocks.part(self._shape.grid),),
            deadline_s=_DEADLINE_S,
        )
        self._next_id += 1
        cpu_s = sum(self._ask(others, "cpu_s"))
        timed: list[Timed] = self._ask(movers, "ferry", command, self._start_of(movers))
        cpu_s = sum(self._ask(others, "cpu_s")) - cpu_s + sum(one.cpu_s for one in timed)
        num_bytes = sum(one.num_bytes for one in timed)
        if num_bytes != self._shape.grid.num_bytes:
            raise TransportError(f"{mode}: {num_bytes} bytes were moved of {self._shape.grid.num_bytes}")
        for rank, is_right in enumerate(self._ask(self._ends.dst, "is_right", seed, blocks)):
            if not is_right:
                raise TransportError(f"{mode}: bytes at the destination's rank {rank} differ from the source's")
        return Moved(
            speed=_speed(timed),
            cpu_s_per_gib=cpu_s / num_bytes * GIB,
            block_us=_duration_s(timed) / len(blocks.src) * 1e6,
        )

    def copy(self, mode: TransferMode, blocks: Blocks) -> float:
        """GiB/s of the same runs by memcpy, each rank that would move them within its own process."""
        movers, _ = self._sides(mode)
        return _speed(self._ask(movers, "copy", blocks.part(self._shape.grid), self._start_of(movers)))

    def send_plain(self, blocks: Blocks, sending: Sending) -> float:
        """GiB/s of the same bytes over plain sockets: a stream from each rank of the source that has a counterpart."""
        part = blocks.part(self._shape.grid)
        pairs = list(zip(self._ends.src, self._ends.dst, strict=False))
        sources, targets = [src for src, _ in pairs], [dst for _, dst in pairs]
        sizes = self._ask(sources, "count_bytes", part)
        addresses = self._ask(targets, "listen")
        number = self._number
        received = [dst.ask("receive", number, size, sending) for dst, size in zip(targets, sizes, strict=True)]
        at_s = self._start_of(sources)
        sent = [src.ask("send", number, to, part, sending, at_s) for src, to in zip(sources, addresses, strict=True)]
        timed = [answer() for answer in sent]
        for answer in received:
            answer()
        return _speed(timed)

    def _ask(self, links: Sequence[EndLink], verb: str, *arguments: Any) -> list[Any]:
        return ask_all(links, verb, self._number, *arguments)

    def _sides(self, mode: TransferMode) -> tuple[Sequence[EndLink], Sequence[EndLink]]:
        """Who moves the bytes, and who does not."""
        sides = (self._ends.src, self._ends.dst)
        return sides if mode is TransferMode.PUSH else sides[::-1]

    @staticmethod
    def _start_of(links: Sequence[EndLink]) -> float:
        """When ranks of one host shall start, on its clock: soon enough for all of them; at once where it is one."""
        return 0.0 if len(links) == 1 else float(links[0].ask("clock")()) + _LEAD_S


def _duration_s(timed: Sequence[Timed]) -> float:
    """From the first rank's start to the last one's end."""
    return max(one.ended_s for one in timed) - min(one.started_s for one in timed)


def _speed(timed: Sequence[Timed]) -> float:
    return sum(one.num_bytes for one in timed) / _duration_s(timed) / GIB
