"""The compiled handler of peers' messages: what it does, and that it refuses everything it cannot trust."""

import numpy as np
import pytest

from blockferry.connectors.transport import native_messages as messages
from blockferry.connectors.transport import native_packing as packing
from blockferry.connectors.transport import native_service as service

NUM_ROWS = 2
POOL_BYTES = 4096
CONNECTION = 77
TOKEN = (5, -6)
GUARD = 64  # bytes around the pool that nothing may touch


class Rig:
    """A service of one pool, without a network: sends go nowhere, which costs an answer its endpoint."""

    def __init__(self):
        self.memory = np.zeros(POOL_BYTES + 2 * GUARD, np.uint8)
        self.pool = self.memory[GUARD : GUARD + POOL_BYTES]
        self.rows = np.zeros((NUM_ROWS, service.ROW_BYTES // 8), np.int64)
        self.slots = np.zeros(NUM_ROWS * service.SLOTS_PER_ROW * messages.SLOT_BYTES, np.uint8)
        self.state = np.zeros(service.STATE_WORDS, np.int64)
        self.state[service.ROWS] = self.rows.ctypes.data
        self.state[service.NUM_ROWS] = NUM_ROWS
        self.state[service.SLOTS] = self.slots.ctypes.data
        self.state[service.NUM_REGIONS] = 1
        self.state[service.TOKEN : service.TOKEN + 2] = TOKEN
        self.state[service.REGIONS : service.REGIONS + 2] = self.pool.ctypes.data, POOL_BYTES

    def serve(self, message, length=None):
        """Why the message was refused; "" where it was done."""
        data = np.frombuffer(message, np.uint8).copy()
        reason = service.serve(self.state.ctypes.data, data.ctypes.data, len(data) if length is None else length, 0)
        return service.REASONS[reason]


@pytest.fixture
def rig():
    made = Rig()
    assert not made.serve(hello())
    return made


def message(verb, runs=(), payload=b"", **changes):
    header = np.zeros(8, np.int64)
    header[messages.VERSION] = messages.MAGIC
    header[messages.VERB] = verb
    header[messages.ROW] = NUM_ROWS - 1  # rows are given from the last one on
    header[messages.CONNECTION] = CONNECTION
    header[messages.NUM_RUNS] = len(runs)
    for name, value in changes.items():
        header[getattr(messages, name)] = value
    return header.tobytes() + np.array(runs, np.int64).tobytes() + payload


def hello(token=TOKEN, **changes):
    return message(messages.HELLO, payload=np.array(token, np.int64).tobytes(), **changes)


def scatter(*runs, **changes):
    return message(messages.SCATTER, runs, bytes(range(1, 1 + sum(max(0, length) for _, length in runs))), **changes)


def test_packed_writes_land_and_are_counted(rig):
    assert not rig.serve(scatter((100, 3), (10, 2)))
    assert rig.pool[100:103].tolist() == [1, 2, 3]
    assert rig.pool[10:12].tolist() == [4, 5]
    assert np.count_nonzero(rig.memory) == 5
    assert rig.rows[-1, service.ROW_DONE] == 1


BAD = {
    "wrong secret": (hello((5, 6)), "secret"),
    "half the secret": (hello((5, -7)), "secret"),
    "no secret": (hello(()), "sizes"),
    "more than the secret": (hello((5, -6, 7)), "sizes"),
    "short": (scatter((0, 1))[:40], "sizes"),
    "version": (scatter((0, 1), VERSION=messages.MAGIC + 1), "version"),
    "verb": (scatter((0, 1), VERB=99), "verb"),
    "negative offset": (scatter((-1, 1)), "outside"),
    "beyond the end": (scatter((POOL_BYTES - 1, 2)), "outside"),
    "negative length": (scatter((8, -1)), "outside"),
    "huge length": (scatter((0, 1))[:64] + np.array([0, 2**62], np.int64).tobytes(), "outside"),
    "offset that overflows": (
        scatter((0, 1))[:64] + np.array([2**63 - 1, 8], np.int64).tobytes() + b"12345678",
        "outside",
    ),
    "second run bad": (scatter((0, 4), (POOL_BYTES, 1)), "outside"),
    "no runs": (scatter(), "sizes"),
    "negative count": (scatter((0, 1), NUM_RUNS=-1), "sizes"),
    "more runs than bytes": (scatter((0, 1), NUM_RUNS=2), "sizes"),
    "huge count": (scatter((0, 1), NUM_RUNS=2**60), "sizes"),
    "payload too long": (scatter((0, 4)) + b"x", "sizes"),
    "payload too short": (scatter((0, 4))[:-1], "sizes"),
    "no such region": (scatter((0, 1), REGION=1), "outside"),
    "negative region": (scatter((0, 1), REGION=-1), "outside"),
    "another's row": (scatter((0, 1), ROW=0), "row of another"),
    "row below": (scatter((0, 1), ROW=-1), "row of another"),
    "row above": (scatter((0, 1), ROW=NUM_ROWS), "row of another"),
    "another connection": (scatter((0, 1), CONNECTION=CONNECTION + 1), "row of another"),
    "no connection": (scatter((0, 1), CONNECTION=0), "row of another"),
    "gather slot": (message(messages.GATHER, [(0, 1)], SLOT=messages.NUM_SLOTS), "no such slot"),
    "gather negative slot": (message(messages.GATHER, [(0, 1)], SLOT=-1), "no such slot"),
    "gather outside": (message(messages.GATHER, [(0, POOL_BYTES + 1)]), "outside"),
    "gather with payload": (message(messages.GATHER, [(0, 1)], b"x"), "sizes"),
    "gather too much": (message(messages.GATHER, [(0, POOL_BYTES)] * 65), "more bytes"),
    "gather without a way back": (message(messages.GATHER, [(0, 1)]), "nothing to answer"),
    "sum outside": (message(messages.SUM, [(0, POOL_BYTES + 1)]), "outside"),
    "sum with payload": (message(messages.SUM, [(0, 1)], b"x"), "sizes"),
    "sum without a way back": (message(messages.SUM, [(0, 1)]), "nothing to answer"),
    "sum of another region": (message(messages.SUM, [(0, 1)], REGION=2), "outside"),
    "a sum to no record": (message(messages.SUMMED, payload=b"12345678", RECORD=-1), "row of another"),
    "a sum of odd size": (message(messages.SUMMED, payload=b"1234567"), "sizes"),
    "deliver to no record": (message(messages.DELIVER, RECORD=-1), "row of another"),
    "deliver beyond the records": (message(messages.DELIVER, RECORD=service.NUM_RECORDS), "row of another"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_message_that_cannot_be_trusted_is_refused_and_touches_nothing(rig, name):
    bad, words = BAD[name]
    assert words in rig.serve(bad)
    assert not rig.memory.any()


def test_a_stranger_gets_no_row(rig):
    assert rig.serve(hello((5, 6), CONNECTION=1))
    assert rig.rows[:, service.ROW_CONNECTION].tolist() == [0, CONNECTION]


def test_a_refusal_is_counted_where_its_sender_looks(rig):
    rig.serve(scatter((-1, 1)))
    assert rig.rows[-1, [service.ROW_DONE, service.ROW_REFUSED]].tolist() == [0, 1]


def test_a_connection_keeps_its_row_when_it_greets_again(rig):
    rig.serve(scatter((0, 1)))
    assert not rig.serve(hello())
    assert rig.rows[:, service.ROW_CONNECTION].tolist() == [0, CONNECTION]
    assert rig.rows[-1, service.ROW_DONE] == 1


def test_every_row_taken_refuses_a_newcomer_until_one_is_given_back(rig):
    assert not rig.serve(hello(CONNECTION=1))
    assert "taken" in rig.serve(hello(CONNECTION=2))
    assert not rig.serve(message(messages.BYE))
    assert not rig.serve(hello(CONNECTION=2))


def test_a_row_that_nobody_used_for_long_goes_to_a_newcomer(rig):
    assert not rig.serve(hello(CONNECTION=1))
    rig.state[service.NOW_S] = service.STALE_S
    rig.serve(message(messages.SCATTER, [(0, 1)], b"x", ROW=0, CONNECTION=1))
    rig.state[service.NOW_S] = service.STALE_S + 1
    assert not rig.serve(hello(CONNECTION=2))
    assert rig.rows[:, service.ROW_CONNECTION].tolist() == [1, 2]
    assert "row of another" in rig.serve(scatter((0, 1)))


@pytest.fixture
def reader(rig):
    """A link with one read under way: 3 bytes to 50, then 2 to 20, of which an answer carries all."""
    words = np.zeros(packing.LINK_WORDS, np.int64)
    local, lengths = np.array([50, 20], np.int64), np.array([3, 2], np.int64)
    words[packing.OWN_CONNECTION] = CONNECTION
    words[packing.LOCAL_BASE] = rig.pool.ctypes.data
    words[packing.NUM_ASKED] = 1
    words[packing.READS + 2 : packing.READS + 5] = local.ctypes.data, lengths.ctypes.data, 5
    rig.state[service.RECORDS] = words.ctypes.data
    rig.kept = local, lengths
    return words


def test_an_answer_lands_where_the_reader_wanted_it(rig, reader):
    assert not rig.serve(message(messages.DELIVER, payload=b"abcde"))
    assert rig.pool[50:53].tobytes() + rig.pool[20:22].tobytes() == b"abcde"
    assert np.count_nonzero(rig.memory) == 5
    assert reader[packing.NUM_LANDED] == 1


@pytest.mark.parametrize(
    "bad",
    [
        message(messages.DELIVER, payload=b"abcd"),
        message(messages.DELIVER, payload=b"abcdef"),
        message(messages.DELIVER, payload=b"abcde", SLOT=1),
        message(messages.DELIVER, payload=b"abcde", SLOT=-1),
        message(messages.DELIVER, payload=b"abcde", SLOT=messages.NUM_SLOTS),
    ],
)
def test_an_answer_that_nobody_asked_for_is_refused(rig, reader, bad):
    assert "no such slot" in rig.serve(bad)
    assert not rig.memory.any()


def test_an_answer_lands_once(rig, reader):
    rig.serve(message(messages.DELIVER, payload=b"abcde"))
    assert rig.serve(message(messages.DELIVER, payload=b"xxxxx"))
    assert rig.pool[50:53].tobytes() == b"abc"


def test_a_late_answer_to_a_closed_connection_is_dropped(rig, reader):
    rig.state[service.RECORDS] = 0
    assert not rig.serve(message(messages.DELIVER, payload=b"abcde"))
    assert not rig.memory.any()


def test_a_sum_that_nobody_asked_for_is_refused(rig, reader):
    assert "no such slot" in rig.serve(message(messages.SUMMED, payload=b"12345678"))
    assert not rig.memory.any()


def test_random_bytes_never_touch_memory_outside_the_pool(rig):
    rng = np.random.default_rng(5)
    for _ in range(3000):
        runs = rng.integers(-200, POOL_BYTES + 200, (rng.integers(1, 4), 2))
        noise = message(
            int(rng.integers(0, 9)),
            runs,
            rng.bytes(int(rng.integers(0, 3000))),
            NUM_RUNS=int(rng.integers(-2, 6)),
            SLOT=int(rng.integers(-2, 20)),
            REGION=int(rng.integers(-1, 2)),
            ROW=int(rng.integers(-1, 3)),
            RECORD=int(rng.integers(-2, 300)),
        )
        rig.serve(noise, int(rng.integers(0, len(noise) + 1)))
    assert not rig.memory[:GUARD].any()
    assert not rig.memory[-GUARD:].any()
