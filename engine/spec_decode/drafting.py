"""The rows of a step that modules draft for, and how far: each as long as its drafts are likely enough to hold.

Modules say how likely each of their tokens is. What they say of a row's drafts, multiplied, is the chance that all of
them hold, and no draft is made behind those of which that is less than CONFIDENCE: to make one takes a pass over a
module and its head, and it is kept only if all before it were. (transformers stops its assistant models likewise, by
`assistant_confidence_threshold`, at the chance of a single token.)

    chances of a row's drafts   0.9  0.6  0.5        0.9 * 0.6 = 0.54: goes on;  * 0.5 = 0.27: the fourth is not made

Owns nothing; drafts are the caller's array.

Legend: S sampling rows, K drafts to propose, W rows that are being drafted for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.models.draft_vocabulary import BestTokens
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.wire import NO_DRAFT

CONFIDENCE = 0.5  # from 0.3 to 0.6, what a request of SmolLM2-135M gains on a CPU differs by 1 %


class Drafting:
    """Of one step. Rows that have drafts already are left alone."""

    def __init__(self, drafts_SK: NDArray[np.int32], *, min_chance: float) -> None:
        """`drafts_SK` is written. Rows go on while all their drafts hold with a chance of min_chance; 0.0: always."""
        self._drafts_SK = drafts_SK
        self._min_chance = min_chance
        has_none_S = drafts_SK[:, 0] == NO_DRAFT if drafts_SK.shape[1] else np.zeros(len(drafts_SK), np.bool_)
        self.places_W: Int64Array = has_none_S.nonzero()[0]  # among the sampling rows
        self._chances_W = np.ones(len(self.places_W))

    def is_over(self, number: int) -> bool:
        """Whether nobody wants a draft of this number, from 0 on."""
        return number >= self._drafts_SK.shape[1] or not len(self.places_W)

    def put(self, number: int, best: BestTokens) -> Int64Array:
        """Each row's draft of this number. Returns which of the rows go on [W'], who are the rows from now on."""
        self._drafts_SK[self.places_W, number] = best.token_ids_S.cpu().numpy()
        self._chances_W *= best.chances_S.cpu().numpy()
        going: Int64Array = (self._chances_W >= self._min_chance).nonzero()[0]
        self.places_W, self._chances_W = self.places_W[going], self._chances_W[going]
        return going

    def last(self, number: int) -> Int32Array:
        """int32 [W]: the rows' drafts of this number."""
        drafts_W: Int32Array = self._drafts_SK[self.places_W, number]
        return drafts_W
