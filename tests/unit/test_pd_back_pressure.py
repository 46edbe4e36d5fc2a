"""Bytes in flight over all transfers of a rank: bounded, shared fairly, not to be taken by one frozen peer."""

import pytest
from support.pd_pools import command, make_layout

from blockferry.connectors.base import PoolEndpoint, TransferState
from blockferry.connectors.compute_progress import ComputeProgress
from blockferry.connectors.pd_links import Link
from blockferry.connectors.pd_transfers import TransferLimits, Transfers
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport

BLOCK_BYTES = 16 * 4 * 4 * 32
NUM_BLOCKS = 512
BLOCKS_EACH = 4
LIMITS = TransferLimits(
    batch_bytes=BLOCK_BYTES, num_batches_in_flight=2, max_bytes_in_flight=8 * BLOCK_BYTES, quiesce_timeout_s=0.0
)


class Rank:
    """A source whose transfers advance when told, and two destinations."""

    def __init__(self):
        fabric = LoopbackFabric()
        layout = make_layout(num_blocks=NUM_BLOCKS)
        self.fabric, self.events = fabric, []
        self.transport = LoopbackTransport(fabric)
        self.region = self.transport.allocate(layout.num_bytes)
        self.region.view[:] = 1
        self.others = {name: LoopbackTransport(fabric) for name in ("d0", "d1")}
        self.pools = {name: transport.allocate(layout.num_bytes) for name, transport in self.others.items()}
        endpoints = {name: _endpoint(name, layout, self.others[name], self.pools[name]) for name in self.others}
        self.transfers = Transfers(
            own=_endpoint("p0", layout, self.transport, self.region),
            rank=0,
            links={name: [Link(self.transport, local=self.region, endpoint=one)] for name, one in endpoints.items()},
            on_event=self.events.append,
            limits=LIMITS,
            progress=ComputeProgress(),
        )

    def start(self, number, *, to="d0", deadline_s=20.0):
        ids = [1 + BLOCKS_EACH * number + i for i in range(BLOCKS_EACH)]
        self.transfers.start(
            command(ids, ids, 16 * BLOCKS_EACH, transfer_id=number, dst_instance_id=to, deadline_s=deadline_s),
            received_s=0.0 if deadline_s == 0 else float("inf"),
        )

    def landed(self, number, to="d0"):
        """Blocks of a transfer that have come."""
        first = 1 + BLOCKS_EACH * number
        return int(self.pools[to].view.reshape(NUM_BLOCKS, -1)[first : first + BLOCKS_EACH, 0].sum())


def _endpoint(name, layout, transport, region):
    return PoolEndpoint(
        instance_id=name,
        tp_rank=0,
        pp_rank=0,
        model_fingerprint="m",
        layouts=(layout,),
        transport="loopback",
        host_id="here",
        address=transport.address,
        region=region.key,
    )


@pytest.fixture
def rank():
    return Rank()


def test_a_hundred_transfers_post_no_more_than_the_limit(rank):
    rank.fabric.stall(rank.others["d0"].address)
    rank.fabric.stall(rank.others["d1"].address)
    for number in range(100):
        rank.start(number, to=("d0", "d1")[number % 2])
    while rank.transfers.advance():
        pass
    assert rank.transport.num_bytes_queued == LIMITS.max_bytes_in_flight


def test_all_of_them_end(rank):
    for number in range(100):
        rank.start(number)
    while rank.transfers:
        rank.transport.progress()
        rank.transfers.advance()
        assert rank.transport.num_bytes_queued <= LIMITS.max_bytes_in_flight
    assert {event.state for event in rank.events} == {TransferState.DONE}
    assert [rank.landed(number) for number in range(100)] == [BLOCKS_EACH] * 100


def test_every_transfer_moves_before_any_has_moved_much_more(rank):
    for number in range(20):
        rank.start(number)
    for _ in range(20 * BLOCKS_EACH // 2):  # one batch lands each time
        rank.transfers.advance()
        rank.transport.progress()
    landed = [rank.landed(number) for number in range(20)]
    assert max(landed) - min(landed) <= 2


def test_a_frozen_peer_leaves_room_for_others(rank):
    rank.fabric.stall(rank.others["d0"].address)
    for number in range(50):
        rank.start(number, to="d0")
    while rank.transfers.advance():
        pass
    rank.start(60, to="d1")
    for _ in range(20):
        rank.transfers.advance()
        rank.transport.progress()
    assert [event.transfer_id for event in rank.events] == [60]


def test_what_a_dropped_connection_held_is_free_again(rank):
    rank.fabric.stall(rank.others["d0"].address)
    for number in range(4):
        rank.start(number, to="d0", deadline_s=0.0)
    while rank.transfers:
        rank.transfers.advance()
    rank.fabric.resume(rank.others["d0"].address)
    for number in range(4, 14):
        rank.start(number)
    while rank.transfers.advance():
        pass
    assert rank.transport.num_bytes_queued == LIMITS.max_bytes_in_flight // 2
