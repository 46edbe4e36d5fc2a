"""Serves peers' messages in compiled code: scatters what they write into pools, sends what they want to read.

Owns the handler that UCX calls for every message, inside the transfer thread's progress and without Python.
Nothing of a message is believed: version, sizes, counts, region bounds and whose row it names are checked before
any memory of a pool is touched; a bad message is counted with its reason and dropped.

    rows      one per connection, which its peer looks at (native_look) instead of being answered: whom it belongs
              to, how many messages were done and refused
    slots     SLOTS_PER_ROW: where the answers to GATHERs, and in the last one to a SUM, lie until UCX has taken them.
              A peer uses a slot again once it has the answer, so nobody here has to wait for one
    records   links of our own reads, which the answers of peers belong to: what lands where is read there, not in
              the message

A connection is a random number its peer chose. HELLO takes a row for it, if it shows the token of this process's
pools, BYE gives it back; a row that nobody used for STALE_S may be taken by another.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blockferry.connectors.transport.native_calls import (
    HAS_REPLY_ENDPOINT,
    RENDEZVOUS,
    call,
    compiled,
    fence,
    load,
    message_handler,
    stream,
)
from blockferry.connectors.transport.native_checksum import xxh64
from blockferry.connectors.transport.native_messages import (
    BYE,
    CONNECTION,
    DELIVER,
    ERR_LAST,
    FREE,
    GATHER,
    HEADER_BYTES,
    HELLO,
    HELLO_BYTES,
    MAGIC,
    MAX_RUNS,
    MAX_SUMMED_BYTES,
    NUM_RUNS,
    NUM_SLOTS,
    PAYLOAD_BYTES,
    PIECES_BYTES,
    RECORD,
    REGION,
    ROW,
    RUN_BYTES,
    SCATTER,
    SLOT,
    SLOT_BYTES,
    SUM,
    SUMMED,
    VERB,
    VERSION,
    WORD,
    has_token,
    put,
    set_piece,
    transmit,
    word,
)
from blockferry.connectors.transport.native_packing import OWN_CONNECTION, land, take_sum
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS

# Words of a row.
ROW_CONNECTION, ROW_DONE, ROW_REFUSED, ROW_USED_S = range(4)
ROW_BYTES = 16 * WORD
STALE_S = 60
SLOTS_PER_ROW = NUM_SLOTS + 1

# Words of the state: machine addresses, sizes, counters; then (base, size) of each region and the links of reads.
CALLER, ROWS, NUM_ROWS, SLOTS, NOW_S, NUM_REFUSED, LAST_REASON, NUM_REGIONS, TOKEN = range(9)
REGIONS = TOKEN + TOKEN_WORDS
MAX_REGIONS = 16
RECORDS = REGIONS + 2 * MAX_REGIONS
NUM_RECORDS = 256
STATE_WORDS = RECORDS + NUM_RECORDS

# Why a message was refused; 0 is success.
REASONS = (
    "",
    "another version of the message format",
    "an unknown verb",
    "its sizes do not add up",
    "a run outside the pool",
    "a row of another connection",
    "no such slot",
    "more bytes than a message may ask for",
    "every row is taken",
    "it came without its data",
    "nothing to answer it by",
    "it does not know the secret of this process's pools",
)
_VERSION, _VERB, _SIZES, _OUTSIDE, _ROW, _SLOT, _TOO_MUCH, _FULL, _NO_DATA, _NO_ANSWER, _STRANGER = range(1, 12)


@compiled
def serve(state: int, message: int, length: int, reply_endpoint: int) -> int:
    """Do what a message of `length` bytes asks; 0 or why it was refused (an index of REASONS)."""
    if length < HEADER_BYTES:
        return _SIZES
    if word(message, VERSION) != MAGIC:
        return _VERSION
    verb, connection = word(message, VERB), word(message, CONNECTION)
    if verb == HELLO:
        return _greeted(state, message, length)
    if verb == DELIVER:
        return _deliver(state, message, length)
    if verb == SUMMED:
        return _take_sum(state, message, length)
    row = _row_of(state, word(message, ROW), connection)
    return _serve_row(state, row, message, length, reply_endpoint) if row else _ROW


@compiled
def _serve_row(state: int, row: int, message: int, length: int, reply_endpoint: int) -> int:
    """Do what a connection asks that has a row, and count it there."""
    verb, reason = word(message, VERB), _VERB
    if verb == BYE:
        put(row, ROW_CONNECTION, 0)
        return 0
    if verb == SCATTER:
        reason = _scatter(state, message, length)
    elif verb == GATHER:
        reason = _answer(state, message, length, reply_endpoint)
    elif verb == SUM:
        reason = _sum(state, message, length, reply_endpoint)
    put(row, ROW_USED_S, word(state, NOW_S))
    counter = ROW_REFUSED if reason else ROW_DONE
    put(row, counter, word(row, counter) + 1)
    return reason


@compiled
def _greeted(state: int, message: int, length: int) -> int:
    """Give a row to who knows the secret."""
    if length != HELLO_BYTES:
        return _SIZES
    if not has_token(message + HEADER_BYTES, state + TOKEN * WORD):
        return _STRANGER
    return _welcome(state, word(message, CONNECTION))


@compiled
def _welcome(state: int, connection: int) -> int:
    """Give a connection the row it has, else one that is free or stale."""
    now_s, chosen = word(state, NOW_S), 0
    if connection == 0:
        return _ROW
    for i in range(word(state, NUM_ROWS)):
        row = word(state, ROWS) + i * ROW_BYTES
        owner = word(row, ROW_CONNECTION)
        if owner == connection:
            put(row, ROW_USED_S, now_s)
            return 0
        if owner == 0 or (chosen == 0 and now_s - word(row, ROW_USED_S) > STALE_S):
            chosen = row
    if chosen == 0:
        return _FULL
    for i in range(ROW_BYTES // WORD):
        put(chosen, i, 0)
    put(chosen, ROW_USED_S, now_s)
    put(chosen, ROW_CONNECTION, connection)
    return 0


@compiled
def _row_of(state: int, index: int, connection: int) -> int:
    """Address of the row, or 0 where it is not the connection's."""
    if index < 0 or index >= word(state, NUM_ROWS) or connection == 0:
        return 0
    row = word(state, ROWS) + index * ROW_BYTES
    return row if word(row, ROW_CONNECTION) == connection else 0


@compiled
def _region_of(state: int, index: int) -> int:
    """Address of a region's (base, size), or 0."""
    return state + (REGIONS + 2 * index) * WORD if 0 <= index < word(state, NUM_REGIONS) else 0


@compiled
def _total_bytes(message: int, length: int, size: int) -> int:
    """Bytes of all runs of a message, or minus why it is refused."""
    num_runs = word(message, NUM_RUNS)
    if num_runs < 1 or num_runs > MAX_RUNS or num_runs > (length - HEADER_BYTES) // RUN_BYTES:
        return -_SIZES
    total = 0
    for i in range(num_runs):
        offset, num_bytes = word(message + HEADER_BYTES, 2 * i), word(message + HEADER_BYTES, 2 * i + 1)
        if offset < 0 or num_bytes < 0 or num_bytes > size or offset > size - num_bytes:
            return -_OUTSIDE
        total += num_bytes
    return total


@compiled
def _asked_bytes(message: int, length: int, size: int, limit: int) -> int:
    """Bytes of all runs of a question, which carries none itself, or minus why it is refused."""
    total = _total_bytes(message, length, size)
    if total < 0:
        return total
    if length != HEADER_BYTES + word(message, NUM_RUNS) * RUN_BYTES:
        return -_SIZES
    return -_TOO_MUCH if total > limit else total


@compiled
def _scatter(state: int, message: int, length: int) -> int:
    """Put a message's payload into its runs."""
    region = _region_of(state, word(message, REGION))
    if region == 0:
        return _OUTSIDE
    total = _total_bytes(message, length, word(region, 1))
    if total < 0:
        return -total
    num_runs, base = word(message, NUM_RUNS), word(region, 0)
    payload = message + HEADER_BYTES + num_runs * RUN_BYTES
    if length != payload + total - message:
        return _SIZES
    for i in range(num_runs):
        num_bytes = word(message + HEADER_BYTES, 2 * i + 1)
        stream(base + word(message + HEADER_BYTES, 2 * i), payload, num_bytes)
        payload += num_bytes
    fence()
    return 0


@compiled
def _answer(state: int, message: int, length: int, reply_endpoint: int) -> int:
    """Send the bytes of a message's runs back."""
    region, number = _region_of(state, word(message, REGION)), word(message, SLOT)
    if region == 0:
        return _OUTSIDE
    if number < 0 or number >= NUM_SLOTS:
        return _SLOT
    total, num_runs = _asked_bytes(message, length, word(region, 1), PAYLOAD_BYTES), word(message, NUM_RUNS)
    if total < 0:
        return -total
    slot = _begin_answer(state, message, number, DELIVER)
    for i in range(num_runs):
        run = message + HEADER_BYTES + i * RUN_BYTES
        set_piece(slot, i, word(region, 0) + word(run, 0), word(run, 1))
    return _send_answer(word(state, CALLER), reply_endpoint, slot, HEADER_BYTES, num_runs)


@compiled
def _sum(state: int, message: int, length: int, reply_endpoint: int) -> int:
    """Send the checksum of a message's runs back, see native_checksum."""
    region, first = _region_of(state, word(message, REGION)), word(message, SLOT)
    if region == 0:
        return _OUTSIDE
    total, num_runs = _asked_bytes(message, length, word(region, 1), MAX_SUMMED_BYTES), word(message, NUM_RUNS)
    if total < 0:
        return -total
    value = np.uint64(0)
    for i in range(num_runs):
        run = message + HEADER_BYTES + i * RUN_BYTES
        value += xxh64(word(region, 0) + word(run, 0), word(run, 1), np.uint64(first + i))
    slot = _begin_answer(state, message, NUM_SLOTS, SUMMED)
    put(slot + PIECES_BYTES + HEADER_BYTES, 0, int(np.int64(value)))
    return _send_answer(word(state, CALLER), reply_endpoint, slot, HEADER_BYTES + WORD, 0)


@compiled
def _begin_answer(state: int, message: int, number: int, verb: int) -> int:
    """Write the head of an answer into a slot of the asker's row; the slot."""
    slot = word(state, SLOTS) + (word(message, ROW) * SLOTS_PER_ROW + number) * SLOT_BYTES
    for i in range(HEADER_BYTES // WORD):
        put(slot + PIECES_BYTES, i, word(message, i))
    put(slot + PIECES_BYTES, VERB, verb)
    return slot


@compiled
def _send_answer(caller: int, reply_endpoint: int, slot: int, head_bytes: int, num_pieces: int) -> int:
    if reply_endpoint == 0:
        return _NO_ANSWER
    request = transmit(caller, reply_endpoint, slot, head_bytes, num_pieces)
    if ERR_LAST <= request < 0:
        return _NO_ANSWER
    if request != 0:
        call(word(caller, FREE), (request,))  # UCX lets go of it when it is done
    return 0


@compiled
def _deliver(state: int, message: int, length: int) -> int:
    """Land the answer to one of our reads. One for a connection that is closed by now is dropped in silence."""
    record = word(message, RECORD)
    if record < 0 or record >= NUM_RECORDS:
        return _ROW
    link = _link_of(state, record, word(message, CONNECTION))
    is_asked_for = link == 0 or land(link, word(message, SLOT), message + HEADER_BYTES, length - HEADER_BYTES)
    return 0 if is_asked_for else _SLOT


@compiled
def _take_sum(state: int, message: int, length: int) -> int:
    """Note the answer to one of our questions for a checksum, as _deliver() does with bytes."""
    record = word(message, RECORD)
    if record < 0 or record >= NUM_RECORDS:
        return _ROW
    if length != HEADER_BYTES + WORD:
        return _SIZES
    link = _link_of(state, record, word(message, CONNECTION))
    is_asked_for = link == 0 or take_sum(link, word(message, SLOT), word(message + HEADER_BYTES, 0))
    return 0 if is_asked_for else _SLOT


@compiled
def _link_of(state: int, record: int, connection: int) -> int:
    """The link of a record if it is still the connection's, else 0."""
    link = word(state, RECORDS + record)
    return link if link != 0 and word(link, OWN_CONNECTION) == connection else 0


def _handle(state: int, _header: int, _header_bytes: int, data: int, length: int, param: int) -> int:
    """ucp_am_recv_callback_t: always UCS_OK, which gives the data back to UCX."""
    attributes = load(param)
    if attributes & RENDEZVOUS:
        reason = _NO_DATA
    else:
        endpoint = load(param + WORD) if attributes & HAS_REPLY_ENDPOINT else 0
        reason = serve(state, data, length, endpoint)
    if reason:
        put(state, LAST_REASON, reason)
        put(state, NUM_REFUSED, word(state, NUM_REFUSED) + 1)
    return 0


@functools.cache
def handler() -> Any:
    """The handler as a C function: `.address`. Compiled once per machine; call it only for its address."""
    return message_handler(_handle)
