"""Proposes what followed a row's last tokens the last time that they occurred in it. Needs no model and no caches.

Owns nothing but its kernel; reads the worker's rows.

Legend: S sampling rows, K drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.config import cache_dir
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep, no_drafts
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_ngram import NgramLookup


class NgramProposer:
    """Of the sampler rank. Called by the worker's model thread."""

    def __init__(self, rows: RowTable, *, min_ngram: int, max_ngram: int) -> None:
        """`rows` hold every token that counts by the time that propose() is called."""
        self._rows = rows
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._look_up = NgramLookup(Launcher(kernel_store(cache_dir() / "kernels")))

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """See DraftProposer."""
        rows_S = step.plan.rows[step.plan.sample]
        if not len(rows_S) or not step.plan.num_proposals:
            return no_drafts(step)
        return self._look_up(
            self._rows.token_ids,
            rows_S,
            self._rows.num_tokens[rows_S],
            min_ngram=self._min_ngram,
            max_ngram=self._max_ngram,
            num_drafts=step.plan.num_proposals,
        )
