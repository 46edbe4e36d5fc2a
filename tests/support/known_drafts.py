"""Drafts of sequences that are known beforehand, so that a test says which of them are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.tiny_families import VOCAB_SIZE

from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep, no_drafts
from blockferry.engine.worker.proposers import ProposerParts


class KnownDrafts:
    """A DraftProposer. A draft is what follows in the sequence that begins as the row does, or a wrong token.

    Which is which goes by the draft's position in the row: marks[position % len(marks)].
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], marks: Sequence[bool], *, rows: RowTable | None = None
    ) -> None:
        """sequences: prompts with their continuations; the first that fits is taken. rows: of(worker) knows them."""
        self._sequences = [list(sequence) for sequence in sequences]
        self._marks = marks
        self._rows = rows

    def of(self, parts: ProposerParts) -> KnownDrafts:
        """What a worker is given to make its proposer with."""
        return KnownDrafts(self._sequences, self._marks, rows=parts.rows)

    def propose(self, step: VerifiedStep) -> np.ndarray:
        assert self._rows is not None
        proposals = no_drafts(step)
        for place, row in enumerate(step.plan.rows[step.plan.sample].tolist()):
            known = self._rows.tokens(row).tolist()
            sequence = next((one for one in self._sequences if one[: len(known)] == known), known)
            following = sequence[len(known) : len(known) + proposals.shape[1]]
            for number, token in enumerate(following):
                is_right = self._marks[(len(known) + number) % len(self._marks)]
                proposals[place, number] = token if is_right else (token + 1) % VOCAB_SIZE
        return proposals
