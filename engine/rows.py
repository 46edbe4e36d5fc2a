"""Rows: the per-sequence arrays that scheduler, ledger and workers index by the same row number.

A request gets a row when it is admitted and keeps it until it ends. Owns the token ids and the
counters; everything else a part needs per row lives in that part's own arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import Int32Array


class RowTable:
    """Token ids and counters of every row. Mutated by its one owner (scheduler or worker).

        token_ids[row]:  | prompt ......... | output ... | drafts | (undefined) |
                         0      num_prompt_tokens    num_tokens            max_model_len
        num_computed_tokens[row] <= num_tokens[row] (+ tokens in flight, on the scheduler's side)

    Arrays are indexed by row. Drafts stand there while a worker verifies them.
    """

    def __init__(self, *, max_rows: int, max_model_len: int) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        # np.empty maps pages lazily: only the tokens that exist take memory.
        self.token_ids: NDArray[np.int32] = np.empty((max_rows, max_model_len), np.int32)
        self.num_tokens: Int32Array = np.zeros(max_rows, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_rows, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_rows, np.int32)
        self.num_encoder_tokens: Int32Array = np.zeros(max_rows, np.int32)  # of the encoder's input; 0 without one

    def assign(self, row: int, token_ids: Int32Array, *, num_prompt_tokens: int, num_encoder_tokens: int = 0) -> None:
        """Start a row with every token known so far; nothing of it is computed yet."""
        num_tokens = len(token_ids)
        assert num_tokens <= self.max_model_len, (num_tokens, self.max_model_len)
        self.token_ids[row, :num_tokens] = token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_computed_tokens[row] = 0
        self.num_encoder_tokens[row] = num_encoder_tokens

    def append(self, rows: Int32Array, token_ids: Int32Array) -> Int32Array:
        """Append one token to each of `rows` (no row twice); returns their new num_tokens, shape [R]."""
        num_tokens = self.num_tokens.take(rows)
        # one flat index costs a third of a pair of index arrays
        self.token_ids.reshape(-1)[rows * np.int64(self.max_model_len) + num_tokens] = token_ids
        num_tokens += 1
        self.num_tokens[rows] = num_tokens
        return num_tokens

    def append_several(
        self,
        rows: NDArray[np.integer],
        token_ids: Int32Array,
        counts: Int32Array,
        index: NDArray[np.intp] | None = None,
    ) -> Int32Array:
        """Append counts [R] tokens to each of `rows` (no row twice), token_ids [sum(counts)] row by row.

        index: place in `rows` of each token's row, [sum(counts)], where the caller has it. Returns their new
        num_tokens, shape [R].
        """
        if index is None:
            index = np.arange(len(counts)).repeat(counts)
        num_tokens = self.num_tokens.take(rows)
        # a token's place in the table, less its place in token_ids
        shift = rows * np.int64(self.max_model_len) + (num_tokens - np.cumsum(counts) + counts)
        self.token_ids.reshape(-1)[shift.take(index) + np.arange(len(token_ids))] = token_ids
        num_tokens += counts
        self.num_tokens[rows] = num_tokens
        return num_tokens

    def put_drafts(self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Write tokens behind the known ones, one per (row, position); they stay unknown."""
        self.token_ids[rows, positions] = token_ids

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.num_tokens[row] = self.num_prompt_tokens[row] = self.num_computed_tokens[row] = 0
        self.num_encoder_tokens[row] = 0

    def tokens(self, row: int) -> Int32Array:
        """View of the row's known tokens, shape [num_tokens]."""
        return self.token_ids[row, : self.num_tokens[row]]


def places_in_runs(counts: NDArray[np.integer]) -> Int32Array:
    """0, 1, .. up to each of counts, one run after the other: int32 [sum(counts)]."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts).astype(np.int32)
