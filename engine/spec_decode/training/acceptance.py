"""How many drafts a model would accept of a module, on greedy text that the module was not trained on.

Legend: B windows, T places, S drafts, E hidden, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blockferry.engine.spec_decode.training.corpus import Writing
from blockferry.engine.spec_decode.training.examples import Batch, Examples
from blockferry.engine.spec_decode.training.module import DraftModule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of drafts 1, 2, ..., each accepted only if all before it were."""

    per_draft: tuple[float, ...]  # part of all places where it would be accepted
    tokens_per_step: float  # when texts are decoded with so many drafts in every step; without any, 1

    def to_json(self) -> dict[str, Any]:
        """Rounded to what a few thousand tokens can tell."""
        return {
            "per_draft": [round(part, 3) for part in self.per_draft],
            "tokens_per_step": round(self.tokens_per_step, 2),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """A module with the ends that it shares with its model."""

    module: DraftModule
    embedding_VE: torch.Tensor
    head_VE: torch.Tensor  # of the drafted vocabulary
    token_ids: torch.Tensor  # int32 [V]: what its rows stand for

    def of(self, batch: Batch) -> np.ndarray:
        """int32 [S, B, T]: drafts at every place, those before it being those of the text."""
        outputs_SBTE = self.module(self.embedding_VE[batch.token_ids_SBT], batch.hidden_BTE, batch.first_B)
        drafts: np.ndarray = self.token_ids[(outputs_SBTE @ self.head_VE.T).argmax(dim=-1)].numpy()
        return drafts


@torch.inference_mode()
def measure_acceptance(
    drafts: Drafts, writings: Sequence[Writing], examples: Examples, *, num_drafts: int = 3
) -> Acceptance:
    """Of the answers in `examples`, which are short enough for one window each."""
    num_places, num_steps = 0, 0
    accepted_S = np.zeros(num_drafts, np.int64)
    for writing, window in zip(writings, examples.windows, strict=True):
        drafts_ST = drafts.of(examples.batch([window], num_steps=num_drafts))[:, 0]
        counts_T = _accepted(drafts_ST, writing.token_ids)[writing.num_prompt_tokens - 1 : -2]
        accepted_S += [(counts_T > draft).sum() for draft in range(num_drafts)]
        num_places += len(counts_T)
        num_steps += _steps(counts_T)
    return Acceptance(
        per_draft=tuple((accepted_S / max(num_places, 1)).tolist()), tokens_per_step=num_places / max(num_steps, 1)
    )


def _accepted(drafts_ST: np.ndarray, text: np.ndarray) -> np.ndarray:
    """int64 [T]: how many drafts at each place are what the text goes on with."""
    is_right_ST = np.zeros(drafts_ST.shape, bool)
    for step, drafts_T in enumerate(drafts_ST):
        following = text[step + 2 :]
        is_right_ST[step, : len(following)] = drafts_T[: len(following)] == following
    counts_T: np.ndarray = np.cumprod(is_right_ST, axis=0).sum(axis=0)
    return counts_T


def _steps(counts_T: np.ndarray) -> int:
    """Steps in which a text is decoded: each yields the accepted drafts and one token."""
    place, num_steps = 0, 0
    while place < len(counts_T):
        place += 1 + int(counts_T[place])
        num_steps += 1
    return num_steps
