"""Looks at a peer's rows: a question, and an answer that holds a copy of them, in compiled code.

An emulated one-sided read would be shorter, and UCX answers those itself. But where the asker's connection has died by
then, UCX aborts the process that answers. What is sent here fails like any other send.

    LOOK   [number, offset, length, token (2 words)]      SEEN   [number, offset, length][bytes of the rows]

Nothing of a message is believed: sizes and bounds are checked, whether a LOOK knows the pools' secret (rows say whose
they are, and who knows that may write), and whether anybody asked for a SEEN.
"""

from __future__ import annotations

import functools
from typing import Any

from blockferry.connectors.transport.native_calls import (
    HAS_REPLY_ENDPOINT,
    RENDEZVOUS,
    call,
    compiled,
    copy,
    fence,
    load,
    message_handler,
)
from blockferry.connectors.transport.native_messages import (
    ERR_LAST,
    FREE,
    SEND,
    WHOLE_PARAM,
    WORD,
    has_token,
    put,
    word,
)
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS

LOOK_ID, SEEN_ID = 2, 3
HEAD_WORDS = 3
HEAD_BYTES = HEAD_WORDS * WORD
LOOK_BYTES = HEAD_BYTES + TOKEN_WORDS * WORD

# Words of the state: what may be looked at, where answers lie until UCX has taken them; then those who ask.
CALLER, ROWS, ROWS_BYTES, ANSWERS, NEXT_ANSWER, TOKEN = range(6)
ASKERS = 8
NUM_ANSWERS = 256  # many more than connections, of which each asks one question at a time
NUM_ASKERS = 256
STATE_WORDS = ASKERS + 4 * NUM_ASKERS
NUMBER, TARGET, TARGET_BYTES, HAS_SEEN = range(4)  # words of an asker; NUMBER 0: unused


@compiled
def answer(state: int, message: int, length: int, endpoint: int) -> bool:
    """Send what a LOOK asks for; False where it asks for the impossible."""
    if length != LOOK_BYTES or endpoint == 0:
        return False
    if not has_token(message + HEAD_BYTES, state + TOKEN * WORD):
        return False
    offset, num_bytes = word(message, 1), word(message, 2)
    size = word(state, ROWS_BYTES)
    if offset < 0 or num_bytes < 0 or num_bytes > size or offset > size - num_bytes:
        return False
    place = word(state, NEXT_ANSWER)
    put(state, NEXT_ANSWER, (place + 1) % NUM_ANSWERS)
    slot = word(state, ANSWERS) + place * (HEAD_BYTES + size)
    for i in range(HEAD_WORDS):
        put(slot, i, word(message, i))
    copy(slot + HEAD_BYTES, word(state, ROWS) + offset, num_bytes)
    caller = word(state, CALLER)
    param = word(caller, WHOLE_PARAM)
    request = call(word(caller, SEND), (endpoint, SEEN_ID, 0, 0, slot, HEAD_BYTES + num_bytes, param))
    if request != 0 and not ERR_LAST <= request < 0:
        call(word(caller, FREE), (request,))  # UCX lets go of it when it is done
    return True


@compiled
def take(state: int, message: int, length: int) -> bool:
    """Land a SEEN where its asker wants it; False where nobody asked for it."""
    if length < HEAD_BYTES:
        return False
    number, offset, num_bytes = word(message, 0), word(message, 1), word(message, 2)
    if number == 0 or num_bytes != length - HEAD_BYTES:
        return False
    for i in range(NUM_ASKERS):
        asker = state + (ASKERS + 4 * i) * WORD
        if word(asker, NUMBER) == number:
            size = word(asker, TARGET_BYTES)
            if offset < 0 or num_bytes > size or offset > size - num_bytes:
                return False
            copy(word(asker, TARGET) + offset, message + HEAD_BYTES, num_bytes)
            fence()
            put(asker, HAS_SEEN, 1)
            return True
    return False


def _on_look(state: int, _header: int, _header_bytes: int, data: int, length: int, param: int) -> int:
    attributes = load(param)
    if not attributes & RENDEZVOUS and attributes & HAS_REPLY_ENDPOINT:
        answer(state, data, length, load(param + WORD))
    return 0


def _on_seen(state: int, _header: int, _header_bytes: int, data: int, length: int, param: int) -> int:
    if not load(param) & RENDEZVOUS:
        take(state, data, length)
    return 0


@functools.cache
def handlers() -> dict[int, Any]:
    """The handlers as C functions by message id: `.address`. Compiled once per machine; called by UCX only."""
    return {LOOK_ID: message_handler(_on_look), SEEN_ID: message_handler(_on_seen)}
