"""How a rank computes a pass of a module that drafts: layer by layer, or in one call where the CPU can.

Owns nothing; backends.py chooses.

Legend: T tokens of the pass, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from blockferry.engine.models.mtp import Drafter, DraftOutput
from blockferry.engine.models.step import Step
from blockferry.engine.worker.paged_caches import GroupMetadata, PagedCaches

if TYPE_CHECKING:
    from blockferry.engine.models.cpu_draft import TapedModule


class DraftCompute(Protocol):
    """A rank's modules bound to their pages. The worker's model thread calls it, on all ranks of the stage alike."""

    def forward(
        self,
        depth: int,
        token_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        *,
        positions_T: torch.Tensor,
        metadata: Sequence[GroupMetadata],
    ) -> DraftOutput:
        """Drafter.forward(), metadata per cache group. What it returns may be overwritten by the next pass."""


class LayeredDrafts:
    """Any pass of any module."""

    def __init__(self, drafter: Drafter, caches: PagedCaches) -> None:
        self._drafter = drafter
        self._caches = caches

    def forward(
        self,
        depth: int,
        token_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        *,
        positions_T: torch.Tensor,
        metadata: Sequence[GroupMetadata],
    ) -> DraftOutput:
        """See DraftCompute."""
        self._caches.begin(metadata)
        return self._drafter.forward(depth, token_ids_T, hidden_TE, Step(positions_T=positions_T, caches=self._caches))


class TapedDrafts:
    """Passes of one-token rows on tape, all others layer by layer."""

    def __init__(self, taped: Sequence[TapedModule], groups: Sequence[int], otherwise: DraftCompute) -> None:
        """`groups` says which cache group each module's layer is of."""
        self._taped = taped
        self._groups = groups
        self._otherwise = otherwise

    def forward(
        self,
        depth: int,
        token_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        *,
        positions_T: torch.Tensor,
        metadata: Sequence[GroupMetadata],
    ) -> DraftOutput:
        """See DraftCompute."""
        attention, taped = metadata[self._groups[depth]].attention, self._taped[depth]
        if attention is not None and taped.accepts(attention):
            return taped.forward(token_ids_T, hidden_TE, positions_T, attention)
        return self._otherwise.forward(depth, token_ids_T, hidden_TE, positions_T=positions_T, metadata=metadata)
