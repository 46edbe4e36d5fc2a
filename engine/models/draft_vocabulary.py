"""The tokens that may be drafted, and which of them the head finds most likely: all, or a shortlist of common ones.

Ranks hold the rows of their part of the vocabulary; what is best of all of them, each learns in one sum:

    rank 0: | value, token, total | 0, 0, 0             |
    rank 1: | 0, 0, 0             | value, token, total |   ->  all_reduce  ->  every rank picks the greatest value, of
                                                                                equals the lowest token

total is the log of the rank's summed exponentials, so that all ranks compute the same chance of the winner too.

A shortlist only shortens the search: a token outside of it is never drafted, and never wrong for it.

Legend: S tokens that want a draft, E hidden, V this rank's vocabulary rows, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.layers import Communicator, Linear


class BestTokens(NamedTuple):
    """Of tokens that want a draft, the same on every rank."""

    token_ids_S: torch.Tensor  # int64
    chances_S: torch.Tensor  # what the head gives each, of all tokens that may be drafted


class DraftVocabulary:
    """One rank's rows of the head."""

    def __init__(self, head: Linear, token_ids_V: torch.Tensor, communicator: Communicator) -> None:
        """`token_ids_V` (int64, ascending): of the head's first rows; further rows are padding. May be empty."""
        self._head = head
        self._token_ids_V = token_ids_V
        self._communicator = communicator

    def best(self, normed_SE: torch.Tensor) -> BestTokens:
        """All ranks must call it. Of equally likely tokens the lowest."""
        return self._best_alone(normed_SE) if self._communicator.size == 1 else self._best_of_ranks(normed_SE)

    def _best_alone(self, normed_SE: torch.Tensor) -> BestTokens:
        chances_SV = self._logits(normed_SE).softmax(dim=-1)
        if chances_SV.device.type == "cpu":  # NumPy's argmax is vectorised where torch's is not
            place_S = torch.from_numpy(chances_SV.numpy().argmax(axis=-1))
        else:
            place_S = chances_SV.argmax(dim=-1)
        return BestTokens(self._token_ids_V[place_S], chances_SV.gather(1, place_S[:, None])[:, 0])

    def _best_of_ranks(self, normed_SE: torch.Tensor) -> BestTokens:
        value_S, token_S, total_S = self._best_here(normed_SE)
        size, rank = self._communicator.size, self._communicator.rank
        found_SP3 = torch.zeros((len(token_S), size, 3), dtype=torch.float64, device=token_S.device)
        found_SP3[:, rank] = torch.stack((value_S.double(), token_S.double(), total_S.double()), dim=1)
        value_SP, token_SP, total_SP = self._communicator.all_reduce(found_SP3).unbind(dim=-1)
        value_S1, winner_S1 = value_SP.max(dim=1, keepdim=True)
        chances_S = (value_S1[:, 0] - total_SP.logsumexp(dim=1)).exp()
        return BestTokens(token_SP.gather(1, winner_S1)[:, 0].long(), chances_S)

    def _best_here(self, normed_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(values, tokens, totals) [S] each."""
        if not len(self._token_ids_V):
            nothing_S = torch.full((len(normed_SE),), -torch.inf, device=normed_SE.device)
            return nothing_S, torch.zeros(len(normed_SE), dtype=torch.int64, device=normed_SE.device), nothing_S
        logits_SV = self._logits(normed_SE)
        value_S, place_S = logits_SV.max(dim=-1)
        return value_S, self._token_ids_V[place_S], logits_SV.logsumexp(dim=-1)

    def _logits(self, normed_SE: torch.Tensor) -> torch.Tensor:
        """float32 [S, V]."""
        return self._head(normed_SE)[:, : len(self._token_ids_V)].float()


def check_shortlist(token_ids: torch.Tensor, vocab_size: int, *, name: str) -> None:
    """Raises ModelLoadError unless it is a list of different tokens of the vocabulary in ascending order."""
    is_list = token_ids.dim() == 1 and len(token_ids) > 0 and not token_ids.is_floating_point()
    if not is_list or bool((token_ids.diff() <= 0).any()):
        raise ModelLoadError(f"{name} is no ascending list of token ids; its shape is {tuple(token_ids.shape)}")
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        raise ModelLoadError(
            f"{name} reaches from {int(token_ids[0])} to {int(token_ids[-1])}, the model has {vocab_size} tokens"
        )
