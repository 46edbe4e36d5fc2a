"""The messages that carry packed runs between two UCX workers: their format, and how one is sent without a copy.

Owns the layout of a message and of the slot in which a sender keeps it until UCX has taken it:

    message   [header: 8 words][runs: (offset, length) pairs][payload]          little-endian int64 words
    slot      [pieces: (address, length) pairs, the message's head first][message]

A few long pieces are handed to UCX as they lie in the pool; many short ones are gathered behind the head first.
Addresses are plain integers; who calls has checked them.
"""

from __future__ import annotations

from blockferry.connectors.transport.native_calls import call, compiled, copy, load, store
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS

MAGIC = 0x626C6F636B000002  # changes with the format
AM_ID = 1
WORD = 8  # bytes
HEADER_BYTES = 8 * WORD
RUN_BYTES = 2 * WORD
MESSAGE_BYTES = (256 << 10) - 256  # with UCX's headers one segment of TCP, which is handled where it was received
PAYLOAD_BYTES = MESSAGE_BYTES - HEADER_BYTES
MAX_RUNS = 512
PIECES_BYTES = (MAX_RUNS + 1) * 2 * WORD
SLOT_BYTES = PIECES_BYTES + MESSAGE_BYTES
NUM_SLOTS = 16  # of each kind and connection: 4 MiB under way
MAX_SUMMED_BYTES = 64 << 20  # that one message may have summed

# Words of a message's header. ROW: the connection's row at the receiver; of a DELIVER, its record there.
# SLOT: of a GATHER; of a SUM, the number of its first run. A HELLO ends with the token of the pools' secret.
VERSION, VERB, ROW, CONNECTION, REGION, SLOT, RECORD, NUM_RUNS = range(8)
HELLO_BYTES = HEADER_BYTES + TOKEN_WORDS * WORD
HELLO, BYE, SCATTER, GATHER, DELIVER, SUM, SUMMED = range(1, 8)

# Words of a caller: how to call libucp.
SEND, CHECK, FREE, PROGRESS, WORKER, WHOLE_PARAM, PIECES_PARAM, REPLY_PARAM = range(8)
CALLER_WORDS = 8

ERR_LAST = -100  # UCS_ERR_LAST: a returned pointer in [-100, -1] is an error, any other non-zero one a request
IN_PROGRESS = 1  # UCS_INPROGRESS

_MAX_PIECES = 32  # UCX_TCP_MAX_IOV less what UCX needs
_MIN_PIECE_BYTES = 8 << 10  # shorter pieces are cheaper to copy than to name


@compiled
def word(base: int, index: int) -> int:
    """The index-th word at an address."""
    return load(base + index * WORD)


@compiled
def put(base: int, index: int, value: int) -> None:
    """Set the index-th word at an address."""
    store(base + index * WORD, value)


@compiled
def has_token(shown: int, own: int) -> bool:
    """Whether the token at an address is ours; takes as long for every wrong one."""
    return (word(shown, 0) ^ word(own, 0)) | (word(shown, 1) ^ word(own, 1)) == 0


@compiled
def set_piece(slot: int, index: int, address: int, length: int) -> None:
    """Name the index-th piece of a slot's payload."""
    put(slot, 2 * index + 2, address)
    put(slot, 2 * index + 3, length)


@compiled
def set_run(slot: int, index: int, offset: int, length: int) -> None:
    """Write the index-th run of a slot's message."""
    put(slot + PIECES_BYTES + HEADER_BYTES, 2 * index, offset)
    put(slot + PIECES_BYTES + HEADER_BYTES, 2 * index + 1, length)


@compiled
def transmit(caller: int, endpoint: int, slot: int, head_bytes: int, num_pieces: int) -> int:
    """Send a slot's message, head and pieces: 0, an error, or UCX's request, until whose end all must stay."""
    message, total = slot + PIECES_BYTES, 0
    for i in range(num_pieces):
        total += word(slot, 2 * i + 3)
    if 0 < num_pieces <= _MAX_PIECES and total >= num_pieces * _MIN_PIECE_BYTES:
        put(slot, 0, message)
        put(slot, 1, head_bytes)
        param = word(caller, PIECES_PARAM)
        return call(word(caller, SEND), (endpoint, AM_ID, 0, 0, slot, num_pieces + 1, param))
    target = message + head_bytes
    for i in range(num_pieces):
        copy(target, word(slot, 2 * i + 2), word(slot, 2 * i + 3))
        target += word(slot, 2 * i + 3)
    param = word(caller, REPLY_PARAM if word(message, VERB) in (GATHER, SUM) else WHOLE_PARAM)
    return call(word(caller, SEND), (endpoint, AM_ID, 0, 0, message, target - message, param))


@compiled
def finished(caller: int, request: int) -> int:
    """Free a request that is done: 0; 1 while it is under way; else its error."""
    if request == 0:
        return 0
    status = ((call(word(caller, CHECK), (request,)) & 0xFF) ^ 0x80) - 0x80  # an int8
    if status != IN_PROGRESS:
        call(word(caller, FREE), (request,))
    return status
