"""Drafts of two sources: what followed a row's last tokens where they recur, for all other rows what modules draft.

A recurrence costs no pass over a head and is followed for as many tokens as are wanted, which modules, whose drafts
hold less the further they go, are not worth. Suffix decoding with a speculator for what it does not find does the same
(Oliaro et al., "SuffixDecoding", arXiv:2411.04975).

Owns nothing. The model thread calls it, on all ranks of the last stage alike; all find the same recurrences, as they
hold the same tokens.

Legend: S sampling rows, K drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.spec_decode.base import DraftProposer, ModuleProposer, VerifiedStep


class LookupFirst:
    """See DraftProposer."""

    def __init__(self, lookup: DraftProposer, modules: ModuleProposer) -> None:
        """`lookup` may be one that finds nothing: then modules draft for every row."""
        self._lookup = lookup
        self._modules = modules

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """See DraftProposer."""
        drafts_SK = self._lookup.propose(step)
        self._modules.complete(step, drafts_SK)
        return drafts_SK
