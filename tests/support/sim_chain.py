"""Tokens and slot contents of a simulated model: each is a function of all tokens before it."""

from __future__ import annotations

VOCAB_SIZE = 23
_MASK = (1 << 61) - 1


def fold(state: int, token_id: int) -> int:
    """The number of the slot after `state` that holds token_id."""
    return ((state * 1_000_003 + int(token_id) + 1) * 2_654_435_761 + 12_345) & _MASK | 8


def chain(token_ids) -> list[int]:
    """Slot numbers of a sequence."""
    states, state = [], 1
    for token_id in token_ids:
        state = fold(state, token_id)
        states.append(state)
    return states


def next_token(state: int) -> int:
    """The token that follows a slot number."""
    return (state >> 13) % VOCAB_SIZE
