"""The corpus as training sees it: one long run of tokens with states, and windows of it side by side.

A token t_i+1 and the model's hidden state before it, h_i, are the module's input at place i; what the model says after
t_i+1 is its target. Step s looks s places further.

Legend: N tokens of the corpus, B windows, T places of each, S steps, K targets, E hidden, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import torch

from blockferry.engine.spec_decode.training.corpus import Writing
from blockferry.engine.spec_decode.training.states import States

WINDOW = 320
PROMPT_WEIGHT = 0.15  # of a prediction inside of a prompt, where nothing is ever drafted
HARD_PART = 0.5  # of a target that is the model's first choice alone; the rest is what it thinks of the others too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Neighbouring tokens of one sequence."""

    start: int  # in the corpus
    length: int
    position: int  # of the first one in its sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows side by side, shorter ones padded with places of weight 0."""

    hidden_BTE: torch.Tensor
    token_ids_SBT: torch.Tensor  # int64: the token after each place's hidden state, and after each further step
    first_B: torch.Tensor  # int64: positions of the windows' first tokens
    ids_SBTK: torch.Tensor  # int64: targets, as places in the drafted vocabulary
    probs_SBTK: torch.Tensor  # float32, weighed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A corpus with states."""

    token_ids_N: torch.Tensor  # int64
    weight_N: torch.Tensor  # float32: of predicting this token
    hidden_NE: torch.Tensor
    ids_NK: torch.Tensor  # int64
    probs_NK: torch.Tensor  # float32
    windows: tuple[Window, ...]

    @classmethod
    def of(
        cls, writings: Sequence[Writing], states: Sequence[States], draft_token_ids: torch.Tensor, vocab_size: int
    ) -> Examples:
        """`states` of all parts, in the order of their writings."""
        place_V = torch.zeros(vocab_size, dtype=torch.int64)
        place_V[draft_token_ids] = torch.arange(len(draft_token_ids))
        is_drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
        is_drafted_V[draft_token_ids] = True
        top_ids_NK = torch.cat([part.top_ids_NK for part in states]).long()
        probs_NK = (1.0 - HARD_PART) * torch.cat([part.top_probs_NK for part in states]).float()
        probs_NK[:, 0] += HARD_PART
        return cls(
            token_ids_N=torch.from_numpy(np.concatenate([one.token_ids for one in writings])).long(),
            weight_N=torch.from_numpy(np.concatenate([_weights(one) for one in writings])),
            hidden_NE=torch.cat([part.hidden_NE for part in states]),
            ids_NK=place_V[top_ids_NK],
            probs_NK=probs_NK * is_drafted_V[top_ids_NK],
            windows=tuple(_windows(writings)),
        )

    def batch(self, windows: Sequence[Window], *, num_steps: int) -> Batch:
        """Windows with num_steps predictions of each place."""
        longest = max(window.length for window in windows)
        places_BT = torch.stack([window.start + torch.arange(longest) for window in windows])
        ends_B1 = torch.tensor([[window.start + window.length] for window in windows])
        shifted_SBT = torch.stack([places_BT + 1 + step for step in range(num_steps)])
        is_known_SBT = shifted_SBT < ends_B1
        last = len(self.token_ids_N) - 1
        shifted_SBT = shifted_SBT.clamp(max=last)
        # what is predicted at a place is the token after it, whose weight counts
        weight_SBT = self.weight_N[(shifted_SBT + 1).clamp(max=last)] * is_known_SBT
        return Batch(
            hidden_BTE=self.hidden_NE[places_BT.clamp(max=last)],
            token_ids_SBT=self.token_ids_N[shifted_SBT],
            first_B=torch.tensor([window.position for window in windows]),
            ids_SBTK=self.ids_NK[shifted_SBT],
            probs_SBTK=self.probs_NK[shifted_SBT] * weight_SBT[..., None],
        )


def shuffled(windows: Sequence[Window], *, tokens_per_batch: int, seed: int) -> list[list[Window]]:
    """All windows in batches of about equally long ones, in an order that the seed decides."""
    rng = random.Random(seed)
    ordered = sorted(windows, key=lambda window: (window.length // 16, rng.random()))
    batches: list[list[Window]] = [[]]
    for window in ordered:
        if (len(batches[-1]) + 1) * window.length > tokens_per_batch and batches[-1]:
            batches.append([])
        batches[-1].append(window)
    rng.shuffle(batches)
    return batches


def _weights(writing: Writing) -> np.ndarray:
    weights = np.ones(len(writing.token_ids), np.float32)
    weights[: writing.num_prompt_tokens] = PROMPT_WEIGHT
    return weights


def _windows(writings: Sequence[Writing]) -> list[Window]:
    windows: list[Window] = []
    start = 0
    for one in writings:
        length = len(one.token_ids)
        windows.extend(
            Window(start=start + cut, length=min(WINDOW, length - cut), position=cut)
            for cut in range(0, length - 2, WINDOW)
        )
        start += length
    return windows
