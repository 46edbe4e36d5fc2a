"""What followed a row's last few tokens the last time that they occurred in it: n-gram lookup on CPUs.

The longest recurrence wins, of equally long ones the most recent. What follows it is repeated where the row's end comes
first: the row is then taken to go on in circles. Prompt lookup decoding (A. Saxena, prompt-lookup-decoding, 2023).

    tokens    . a b c d e . . x b c d y . b c d        min_ngram 2, max_ngram 3: b c d occurred last before y
    drafts                                      y . b

Legend: R rows, S rows that are looked up, L tokens of the longest row, K drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, choose_num_threads, compile_kernel
from blockferry.kernels.cpu_vector import jit, load_i32, load_i64, store_i32

NO_DRAFT = -1
TILE = 64  # tokens that are passed over at once where no recurrence ends


class NgramLookup:
    """Looks many rows up in one call. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernel: CompiledKernel | None = None

    def prepare(self) -> CompiledKernel:
        """Compile or load the kernel."""
        if self._kernel is None:
            self._kernel = self._launcher.store.get("ngram", compile_ngram)
        return self._kernel

    def __call__(
        self,
        token_ids_RL: NDArray[np.int32],  # [R, L], last dim contiguous
        rows_S: NDArray[np.int32],  # [S]
        num_tokens_S: NDArray[np.int32],  # [S], known tokens of each of rows_S
        *,
        min_ngram: int,  # >= 1
        max_ngram: int,  # >= min_ngram
        num_drafts: int,
    ) -> NDArray[np.int32]:
        """int32 [S, K]: the drafts of each row, or NO_DRAFT in all places. Cost grows with the rows' tokens."""
        assert token_ids_RL.dtype == rows_S.dtype == num_tokens_S.dtype == np.int32
        assert token_ids_RL.strides[1] == 4
        assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
        rows_S, num_tokens_S = np.ascontiguousarray(rows_S), np.ascontiguousarray(num_tokens_S)
        drafts_SK = np.full((len(rows_S), num_drafts), NO_DRAFT, np.int32)
        arguments = (
            token_ids_RL.ctypes.data,
            token_ids_RL.strides[0],
            rows_S.ctypes.data,
            num_tokens_S.ctypes.data,
            drafts_SK.ctypes.data,
            min_ngram,
            max_ngram,
            num_drafts,
        )
        num_threads = choose_num_threads(4 * int(num_tokens_S.sum()))
        self._launcher.run(self.prepare(), num_threads, len(rows_S), arguments)
        return drafts_SK


def compile_ngram() -> Any:
    """The kernel of NgramLookup; an item is a row."""

    def match_length(tokens: int, end: int, num_tokens: int, most: int) -> int:
        """How many tokens before `end` equal the row's last ones, at most `most` and no more than there are."""
        length = 0
        while (
            length < most
            and length < end
            and load_i32(tokens, end - 1 - length) == load_i32(tokens, num_tokens - 1 - length)
        ):
            length += 1
        return length

    def count_ends(tokens: int, first: int, num_tokens: int, apart: int) -> int:
        """How many of TILE tokens equal the row's last one, and those so far before them the one so far before it.

        No branch inside, so that it compiles to a few vectors.
        """
        last, before = load_i32(tokens, num_tokens - 1), load_i32(tokens, num_tokens - 1 - apart)
        num_equal = 0
        for place in range(first, first + TILE):
            num_equal += (load_i32(tokens, place) == last) & (load_i32(tokens, place - apart) == before)
        return num_equal

    measure, count = jit(match_length), jit(count_ends)

    def look_up(arguments: int, index: int) -> None:
        tokens = load_i64(arguments, 2) + load_i32(load_i64(arguments, 4), index) * load_i64(arguments, 3)
        num_tokens = load_i32(load_i64(arguments, 5), index)
        most, num_drafts = load_i64(arguments, 8), load_i64(arguments, 9)
        best, best_end = load_i64(arguments, 7) - 1, 0
        end = num_tokens - 1
        while end > best and best < most:
            stop = max(end - TILE, best)
            if stop == end - TILE and count(tokens, stop, num_tokens, best) == 0:
                end = stop
            while end > stop and best < most:
                length = measure(tokens, end, num_tokens, most)
                if length > best:
                    best, best_end = length, end
                end -= 1
        if best_end == 0:
            return
        target = load_i64(arguments, 6) + 4 * index * num_drafts
        for place in range(num_drafts):
            source = best_end + place
            if source < num_tokens:
                store_i32(target, place, load_i32(tokens, source))
            else:
                store_i32(target, place, load_i32(target, place - (num_tokens - best_end)))

    return compile_kernel(look_up)
