"""The seam between a worker and who drafts tokens for it.

Draft tokens only ever cost or save time: what is accepted is what the model would have drawn anyway.

Legend: T tokens of the step, S sampling rows of the plan in its order, E hidden, K drafts to propose.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.request import Int32Array
from blockferry.engine.wire import NO_DRAFT, StepPlan
from blockferry.engine.worker.inputs import StepInputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStep:
    """A step whose tokens are drawn; the rows' tokens have been appended already."""

    plan: StepPlan
    hidden_TE: torch.Tensor | None  # after the last layer, before the last norm; None on earlier stages
    inputs: StepInputs  # what was computed; a row's tokens follow each other
    num_tokens_S: Int32Array  # drawn per sampling row: accepted drafts, and one

    def num_final(self) -> Int32Array:
        """int32 [R]: tokens of each row of the plan that were computed and are not drafts that were refused."""
        plan = self.plan
        if not len(plan.num_drafts):
            return plan.num_scheduled
        num_final_R: Int32Array = plan.num_scheduled - plan.num_drafts
        num_final_R[plan.sample] += self.num_tokens_S - 1
        return num_final_R


class DraftProposer(Protocol):
    """Proposes tokens that may follow each sampling row. All ranks call it in every step that computes rows."""

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """int32 [S, K], K = plan.num_proposals: NO_DRAFT where there is none, and after it.

        Means something on the sampler rank only. Keeps whatever caches the proposer has of the step's tokens.
        """


class ModuleProposer(Protocol):
    """Proposes what modules draft, for rows that have no drafts otherwise. All ranks call it, as a DraftProposer."""

    def complete(self, step: VerifiedStep, drafts_SK: NDArray[np.int32]) -> None:
        """Draft for those rows whose drafts begin with NO_DRAFT, in place; caches are kept of all of them.

        All ranks must be given drafts for the same rows.
        """


class NoProposer:
    """Proposes nothing, whatever it is asked."""

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """See DraftProposer."""
        return no_drafts(step)


def no_drafts(step: VerifiedStep) -> NDArray[np.int32]:
    """int32 [S, K]: no draft for any row."""
    return np.full((len(step.num_tokens_S), step.plan.num_proposals), NO_DRAFT, np.int32)
