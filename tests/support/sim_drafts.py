"""Who drafts for a simulated worker: right as often as it is told, and not always willing."""

from __future__ import annotations

import dataclasses

import numpy as np
from support.sim_chain import VOCAB_SIZE, fold, next_token

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.wire import NO_DRAFT


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimDrafts:
    """Drafts of one instance. What is proposed after some tokens depends on these alone."""

    num_tokens: int = 3
    accuracy: float = 0.7  # of each draft, given that the ones before it are right
    willingness: float = 1.0  # how often another draft is proposed at all
    is_adaptive: bool = True

    @property
    def config(self) -> SpeculationConfig:
        return SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=self.num_tokens, is_adaptive=self.is_adaptive)

    def propose(self, state: int, num_proposals: int) -> np.ndarray:
        """Drafts after a slot number, NO_DRAFT where there is none and after it."""
        drafts = np.full(num_proposals, NO_DRAFT, np.int32)
        for place in range(num_proposals):
            luck, will = (state >> 23) % 1000, (state >> 33) % 1000
            if will >= 1000 * self.willingness:
                break
            right = next_token(state)
            drafts[place] = right if luck < 1000 * self.accuracy else (right + 1) % VOCAB_SIZE
            state = fold(state, int(drafts[place]))
        return drafts


NO_DRAFTS = SimDrafts(willingness=0.0)
