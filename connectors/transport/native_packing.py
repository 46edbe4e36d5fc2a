"""Sends runs to a peer in messages, and asks it for runs, in compiled code.

The near end of native_service. Loops never wait: where every slot is still in UCX's hands or everything that may
be asked for is on its way, they return, to be called again after progress. All they know lies in the link.
"""

from __future__ import annotations

import numpy as np

from blockferry.connectors.base import Int64Array
from blockferry.connectors.transport.native_calls import call, compiled, fence, stream
from blockferry.connectors.transport.native_messages import (
    CONNECTION,
    ERR_LAST,
    GATHER,
    HEADER_BYTES,
    IN_PROGRESS,
    MAGIC,
    MAX_RUNS,
    NUM_RUNS,
    NUM_SLOTS,
    PAYLOAD_BYTES,
    PIECES_BYTES,
    PROGRESS,
    RECORD,
    REGION,
    ROW,
    RUN_BYTES,
    SCATTER,
    SLOT,
    SLOT_BYTES,
    SUM,
    VERB,
    VERSION,
    WORKER,
    finished,
    put,
    set_piece,
    set_run,
    transmit,
    word,
)

# Words of a link.
CALLER, ENDPOINT, OWN_CONNECTION, OWN_ROW, OWN_RECORD, PEER_REGION, LOCAL_BASE, STAGING = range(8)
NUM_SENT, NUM_PACKED = 8, 9  # messages: sent; that the peer counts
WRITE_RUN, WRITE_WITHIN = 10, 11  # cursor in the writes: run, bytes of it that are sent
READ_RUN, READ_WITHIN, READ_LOCAL, READ_LENGTHS = range(12, 16)  # cursor in the reads; addresses of arrays asked for
NUM_ASKED, NUM_LANDED = 16, 17  # reads
SUM_STATE, SUM_FIRST, SUM_VALUE = 18, 19, 20  # of the sum that the peer was asked for
REQUESTS = 21  # one of each slot
READS = REQUESTS + NUM_SLOTS  # READ_WORDS of each read under way
READ_WORDS = 6
LINK_WORDS = READS + READ_WORDS * NUM_SLOTS

NO_SUM, ASKED_SUM, HAS_SUM = range(3)
_MAX_ROUNDS = 256  # of progress within one call, while there is any

# Words of a read: where its runs start, in which arrays, how many bytes they are, whether they have come.
_RUN, _WITHIN, _LOCAL, _LENGTHS, _BYTES, _HAS_LANDED = range(READ_WORDS)


@compiled
def send(link: int, verb: int, head_bytes: int, num_pieces: int) -> int:
    """Send the message that lies in the next slot, which must be free; 0 or an error."""
    number = word(link, NUM_SENT) % NUM_SLOTS
    slot = word(link, STAGING) + number * SLOT_BYTES
    message = slot + PIECES_BYTES
    put(message, VERSION, MAGIC)
    put(message, VERB, verb)
    put(message, ROW, word(link, OWN_ROW))
    put(message, CONNECTION, word(link, OWN_CONNECTION))
    put(message, REGION, word(link, PEER_REGION))
    put(message, RECORD, word(link, OWN_RECORD))
    request = transmit(word(link, CALLER), word(link, ENDPOINT), slot, head_bytes, num_pieces)
    if ERR_LAST <= request < 0:
        return request
    put(link, REQUESTS + number, request)
    put(link, NUM_SENT, word(link, NUM_SENT) + 1)
    return 0


@compiled
def free_slot(link: int) -> int:
    """Make the next slot ours: 0; 1 while UCX holds it; or an error."""
    place = REQUESTS + word(link, NUM_SENT) % NUM_SLOTS
    status = finished(word(link, CALLER), word(link, place))
    if status != IN_PROGRESS:
        put(link, place, 0)
    return status


@compiled
def _progress(link: int) -> bool:
    """Let UCX work; whether there was anything to do."""
    caller = word(link, CALLER)
    return call(word(caller, PROGRESS), (word(caller, WORKER),)) & 0xFFFFFFFF != 0


@compiled
def pump_writes(link: int, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> int:
    """Send from the cursor on while slots are free: 0 when all is sent, 1 when not, or an error."""
    for _ in range(_MAX_ROUNDS):
        if word(link, WRITE_RUN) == len(lengths):
            return 0
        status = free_slot(link)
        if status == IN_PROGRESS and _progress(link):
            continue
        if status != 0:
            return status
        num_runs = _fill_writes(link, local, remote, lengths)
        if num_runs == 0:
            return 0  # only empty runs were left
        status = send(link, SCATTER, HEADER_BYTES + num_runs * RUN_BYTES, num_runs)
        if status != 0:
            return status
        put(link, NUM_PACKED, word(link, NUM_PACKED) + 1)
        _progress(link)
    return IN_PROGRESS


@compiled
def _fill_writes(link: int, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> int:
    """Put as much as fits into the next slot; number of its runs."""
    slot = word(link, STAGING) + word(link, NUM_SENT) % NUM_SLOTS * SLOT_BYTES
    i, within, num_runs, room = word(link, WRITE_RUN), word(link, WRITE_WITHIN), 0, PAYLOAD_BYTES
    base = word(link, LOCAL_BASE)
    while i < len(lengths) and num_runs < MAX_RUNS and room > RUN_BYTES:
        length = min(lengths[i] - within, room - RUN_BYTES)
        if length > 0:
            set_run(slot, num_runs, remote[i] + within, length)
            set_piece(slot, num_runs, base + local[i] + within, length)
            room -= RUN_BYTES + length
            num_runs += 1
        within += length
        if within == lengths[i]:
            i, within = i + 1, 0
    put(slot + PIECES_BYTES, NUM_RUNS, num_runs)
    put(link, WRITE_RUN, i)
    put(link, WRITE_WITHIN, within)
    return num_runs


@compiled
def pump_reads(link: int, remote: Int64Array, lengths: Int64Array) -> int:
    """Ask from the cursor on while few reads are under way: 0 when all is asked for, 1 when not, or an error."""
    for _ in range(_MAX_ROUNDS):
        status = _ask(link, remote, lengths)
        if status < 0:
            return status
        if word(link, READ_RUN) == len(lengths):
            return 0
        if not _progress(link):
            return IN_PROGRESS
    return IN_PROGRESS


@compiled
def _ask(link: int, remote: Int64Array, lengths: Int64Array) -> int:
    """Send as many questions as may be under way; 0, 1 where a slot is missing, or an error."""
    while word(link, READ_RUN) < len(lengths) and word(link, NUM_ASKED) - word(link, NUM_LANDED) < NUM_SLOTS:
        status = free_slot(link)
        if status != 0:
            return status
        num_runs = _fill_reads(link, remote, lengths)
        if num_runs == 0:
            return 0  # only empty runs were left
        put(link, NUM_ASKED, word(link, NUM_ASKED) + 1)
        status = send(link, GATHER, HEADER_BYTES + num_runs * RUN_BYTES, 0)
        if status != 0:
            return status
        put(link, NUM_PACKED, word(link, NUM_PACKED) + 1)
    return 0


@compiled
def _fill_reads(link: int, remote: Int64Array, lengths: Int64Array) -> int:
    """Name in the next slot what one answer can carry; number of runs."""
    slot = word(link, STAGING) + word(link, NUM_SENT) % NUM_SLOTS * SLOT_BYTES
    i, within, num_runs, room = word(link, READ_RUN), word(link, READ_WITHIN), 0, PAYLOAD_BYTES
    number = word(link, NUM_ASKED) % NUM_SLOTS
    read = READS + READ_WORDS * number
    put(link, read + _LOCAL, word(link, READ_LOCAL))
    put(link, read + _LENGTHS, word(link, READ_LENGTHS))
    put(link, read + _RUN, i)
    put(link, read + _WITHIN, within)
    while i < len(lengths) and num_runs < MAX_RUNS and room > 0:
        length = min(lengths[i] - within, room)
        if length > 0:
            set_run(slot, num_runs, remote[i] + within, length)
            room -= length
            num_runs += 1
        within += length
        if within == lengths[i]:
            i, within = i + 1, 0
    put(link, read + _BYTES, PAYLOAD_BYTES - room)
    put(link, read + _HAS_LANDED, 0)
    put(slot + PIECES_BYTES, SLOT, number)
    put(slot + PIECES_BYTES, NUM_RUNS, num_runs)
    put(link, READ_RUN, i)
    put(link, READ_WITHIN, within)
    return num_runs


@compiled
def land(link: int, number: int, payload: int, num_bytes: int) -> bool:
    """Scatter an answer into the runs that were asked for; False where nothing of this kind is under way."""
    if not 0 <= number < NUM_SLOTS:
        return False
    num_landed, num_asked = word(link, NUM_LANDED), word(link, NUM_ASKED)
    if (number - num_landed) % NUM_SLOTS >= num_asked - num_landed:
        return False
    read = READS + READ_WORDS * number
    if word(link, read + _HAS_LANDED) != 0 or word(link, read + _BYTES) != num_bytes:
        return False
    i, within, left = word(link, read + _RUN), word(link, read + _WITHIN), num_bytes
    base, local, lengths = word(link, LOCAL_BASE), word(link, read + _LOCAL), word(link, read + _LENGTHS)
    while left > 0:
        length = min(word(lengths, i) - within, left)
        stream(base + word(local, i) + within, payload, length)
        payload += length
        left -= length
        i, within = i + 1, 0
    fence()
    put(link, read + _HAS_LANDED, 1)
    while num_landed < num_asked and word(link, READS + READ_WORDS * (num_landed % NUM_SLOTS) + _HAS_LANDED) != 0:
        num_landed += 1
    put(link, NUM_LANDED, num_landed)
    return True


@compiled
def ask_sum(link: int, offsets: Int64Array, lengths: Int64Array, first: int, stop: int) -> int:
    """Ask the peer to sum runs first to stop, at most MAX_RUNS; 0, 1 where a slot is missing, or an error."""
    status = free_slot(link) if first < stop else 0
    if status != 0 or first == stop:
        return status
    slot = word(link, STAGING) + word(link, NUM_SENT) % NUM_SLOTS * SLOT_BYTES
    for i in range(first, stop):
        set_run(slot, i - first, offsets[i], lengths[i])
    put(slot + PIECES_BYTES, SLOT, first)
    put(slot + PIECES_BYTES, NUM_RUNS, stop - first)
    put(link, SUM_FIRST, first)
    put(link, SUM_STATE, ASKED_SUM)
    put(link, NUM_PACKED, word(link, NUM_PACKED) + 1)
    return send(link, SUM, HEADER_BYTES + (stop - first) * RUN_BYTES, 0)


@compiled
def take_sum(link: int, first: int, value: int) -> bool:
    """Note the peer's sum; False where it was not asked for."""
    if word(link, SUM_STATE) != ASKED_SUM or word(link, SUM_FIRST) != first:
        return False
    put(link, SUM_VALUE, value)
    put(link, SUM_STATE, HAS_SUM)
    return True


def warm_up() -> None:
    """Compile what Python calls here, or take it from the cache. Takes some seconds on a machine that never did."""
    words, nothing = np.zeros(LINK_WORDS, np.int64), np.empty(0, np.int64)
    link: int = words.ctypes.data
    pump_writes(link, nothing, nothing, nothing)
    pump_reads(link, nothing, nothing)
    words[CALLER] = link
    free_slot(link)
    ask_sum(link, nothing, nothing, 0, 0)
