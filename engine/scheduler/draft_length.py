"""How many drafts of a row are worth verifying. Owns what is known of each row's acceptance; knows no tokens.

A row whose drafts are accepted at rate r, each given the ones before it, keeps its j-th draft with probability r**j,
and wins one token by it. In units of the time that reading the weights takes, a step of n positions takes 1 + c * n,
where c is what a position costs, drafting it included. So a draft pays while its token comes at less than the step's
others do: r**j / c > tokens / (1 + c * n). With R rows of about two positions and 1.5 tokens each, as they are where
the decision is close, it pays while r**j > 1.5 * c * R / (1 + 2 * c * R). A row alone drafts even where little of it
holds; in a large batch, whose time is that of its positions, nearly all must hold.

    R = 1        r  0 ... 0.07 ....... 0.26 ..... 0.41 ............. 1        j-th border: paying_rate(R) ** (1 / j)
    R = 64       r  0 ........................ 0.65 .. 0.80 . 0.87 . 1
                    none       | 1 draft   | 2 drafts | 3 drafts

c is 0.05 here: on a CPU, verifying a token of SmolLM2-135M costs 0.016 of a step (tests/bench/bench_verify.py), and a
layer that drafts reads a thirtieth of the model's layers, and part of its language-model head.

r is an exponential average over the drafts whose fate was decided: an accepted one counts 1, the first one refused 0,
those after it are unknown. A row whose drafts do not pay tries one whenever its length is a multiple of
PROBE_INTERVAL. Its rate is never taken for less than LOWEST_RATE, so that a row alone drafts again after one success.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.config import SpeculationConfig
from blockferry.engine.request import Int32Array

POSITION_COST = 0.05  # time to draft and verify a token, over that of reading the weights
FIRST_RATE = 0.8  # taken for a row's rate before anything is known of it
MEMORY = 0.9  # share of the old rate that one decided draft leaves
LOWEST_RATE = 0.05  # one success lifts it over what pays for a row alone: 1 - (1 - 0.05) * 0.9 = 0.145
PROBE_INTERVAL = 16  # tokens
NUM_LEVELS = 1000

IndexArray = NDArray[np.intp]


def paying_rate(num_rows: int) -> float:
    """The chance at which a draft is worth verifying in a step of so many rows; see the module's reasoning."""
    return 1.5 * POSITION_COST * num_rows / (1 + 2 * POSITION_COST * num_rows)


class Wanted(NamedTuple):
    """Drafts that rows [R] want; the caller's to write."""

    now: Int32Array  # after their last known token
    then: Int32Array  # after one token more


class DraftLengths(Protocol):
    """How many drafts each row wants. Mutated by RowDrafts only."""

    def start(self, row: int) -> None:
        """A sequence begins on a row."""

    def learn(self, rows: IndexArray, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """num_drafts [R] of rows [R] were verified, the first num_accepted [R] of them confirmed."""

    def wanted(self, rows: IndexArray, num_tokens: Int32Array) -> Wanted:
        """For rows [R] that have num_tokens [R] and will share a step."""


class FixedLengths:
    """Every row always wants the same number."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = np.int32(num_tokens)

    def start(self, row: int) -> None:
        """Nothing to begin."""

    def learn(self, rows: IndexArray, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Whatever came of it."""

    def wanted(self, rows: IndexArray, num_tokens: Int32Array) -> Wanted:
        """The number."""
        del num_tokens
        return Wanted(now=np.full(len(rows), self._num_tokens), then=np.full(len(rows), self._num_tokens))


class AdaptiveLengths:
    """Every row wants as many as pay at the rate at which its drafts were accepted.

    Rates are kept in whole NUM_LEVELS-ths, so that learning is a look-up in a table of all that can happen.
    """

    def __init__(self, num_tokens: int, *, max_rows: int) -> None:
        rates = np.arange(NUM_LEVELS + 1) / NUM_LEVELS
        places = np.arange(1, num_tokens + 1)
        # [levels]: drafts that pay, by the number of bits of the number of rows
        self._paying: list[Int32Array] = [
            np.searchsorted(paying_rate(1 << num_bits >> 1) ** (1 / places), rates).astype(np.int32)
            for num_bits in range(max_rows.bit_length() + 1)
        ]
        self._levels: Int32Array = np.zeros(max_rows, np.int32)
        self._base = np.int32(num_tokens + 1)
        self._next = _next_levels(rates, num_tokens)

    def start(self, row: int) -> None:
        """Nothing is known of the sequence's drafts."""
        self._levels[row] = round(FIRST_RATE * NUM_LEVELS)

    def learn(self, rows: IndexArray, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """See DraftLengths."""
        cells = self._levels.take(rows) * self._base + num_drafts
        self._levels[rows] = self._next.take(cells * self._base + num_accepted)

    def wanted(self, rows: IndexArray, num_tokens: Int32Array) -> Wanted:
        """See DraftLengths."""
        now = self._paying[len(rows).bit_length()].take(self._levels.take(rows))
        then = now.copy()
        if np.count_nonzero(now) < len(rows):
            quiet = (now == 0).nonzero()[0]
            num_tokens = num_tokens.take(quiet)
            now[quiet] = num_tokens % PROBE_INTERVAL == 0
            then[quiet] = (num_tokens + 1) % PROBE_INTERVAL == 0
        return Wanted(now=now, then=then)


def _next_levels(rates: NDArray[np.float64], num_tokens: int) -> Int32Array:
    """The level that follows each level where d drafts were verified and a accepted, flat from [levels, d, a]."""
    counts = np.arange(num_tokens + 1)
    num_drafts, num_accepted = counts[:, None], counts
    after_accepted = 1 - (1 - rates[:, None, None]) * MEMORY**num_accepted
    after = np.where(num_accepted < num_drafts, MEMORY, 1.0) * after_accepted
    levels: Int32Array = np.rint(np.maximum(after, LOWEST_RATE) * NUM_LEVELS).astype(np.int32).ravel()
    return levels


def make_draft_lengths(config: SpeculationConfig, *, max_rows: int) -> DraftLengths:
    """As the configuration says."""
    if config.is_adaptive:
        return AdaptiveLengths(config.num_tokens, max_rows=max_rows)
    return FixedLengths(config.num_tokens)
