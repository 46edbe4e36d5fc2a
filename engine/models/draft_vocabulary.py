"""The tokens that may be drafted, and which of them the head finds most likely: all, or a shortlist of common ones.

Ranks hold the rows of their part of the vocabulary; what is best of all of them, each learns in one sum:

    rank 0: | value, token | 0, 0         |
    rank 1: | 0, 0         | value, token |    ->  all_reduce  ->  every rank picks the greatest value, of equals the
                                                                   lowest token

A shortlist only shortens the search: a token outside of it is never drafted, and never wrong for it.

Legend: S tokens that want a draft, E hidden, V this rank's vocabulary rows, P ranks.
"""

from __future__ import annotations

import torch

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.layers import Communicator, Linear


class DraftVocabulary:
    """One rank's rows of the head."""

    def __init__(self, head: Linear, token_ids_V: torch.Tensor, communicator: Communicator) -> None:
        """`token_ids_V` (int64, ascending): of the head's first rows; further rows are padding. May be empty."""
        self._head = head
        self._token_ids_V = token_ids_V
        self._communicator = communicator

    def best(self, normed_SE: torch.Tensor) -> torch.Tensor:
        """int64 [S], the same on every rank; all must call it. Of equally likely tokens the lowest."""
        value_S, token_S = self._best_here(normed_SE)
        size, rank = self._communicator.size, self._communicator.rank
        if size == 1:
            return token_S
        found_SP2 = torch.zeros((len(token_S), size, 2), dtype=torch.float64, device=token_S.device)
        found_SP2[:, rank, 0], found_SP2[:, rank, 1] = value_S, token_S.double()
        found_SP2 = self._communicator.all_reduce(found_SP2)
        winner_S1 = found_SP2[:, :, 0].argmax(dim=1, keepdim=True)
        return found_SP2[:, :, 1].gather(1, winner_S1).squeeze(1).long()

    def _best_here(self, normed_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, tokens) [S] each."""
        num_rows = len(self._token_ids_V)
        if not num_rows:
            value_S = torch.full((len(normed_SE),), -torch.inf, device=normed_SE.device)
            return value_S, torch.zeros(len(normed_SE), dtype=torch.int64, device=normed_SE.device)
        logits_SV = self._head(normed_SE)[:, :num_rows]
        if logits_SV.device.type == "cpu":  # NumPy's argmax is vectorised where torch's is not
            place_S = torch.from_numpy(logits_SV.float().numpy().argmax(axis=-1))
            value_S = logits_SV.gather(1, place_S[:, None])[:, 0]
        else:
            value_S, place_S = logits_SV.max(dim=-1)
        return value_S, self._token_ids_V[place_S]


def check_shortlist(token_ids: torch.Tensor, vocab_size: int, *, name: str) -> None:
    """Raises ModelLoadError unless it is a list of different tokens of the vocabulary in ascending order."""
    is_list = token_ids.dim() == 1 and len(token_ids) > 0 and not token_ids.is_floating_point()
    if not is_list or bool((token_ids.diff() <= 0).any()):
        raise ModelLoadError(f"{name} is no ascending list of token ids; its shape is {tuple(token_ids.shape)}")
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        raise ModelLoadError(
            f"{name} reaches from {int(token_ids[0])} to {int(token_ids[-1])}, the model has {vocab_size} tokens"
        )
