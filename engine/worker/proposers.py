"""Who drafts tokens on a worker, as its spec says. Owns nothing."""

from __future__ import annotations

import dataclasses

from blockferry.engine.config import DraftMethod
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import DraftProposer, NoProposer
from blockferry.engine.spec_decode.lone_module import LoneModuleProposer
from blockferry.engine.spec_decode.mtp import DraftPages, MtpProposer
from blockferry.engine.worker.backends import draft_compute
from blockferry.engine.worker.spec import WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProposerParts:
    """What of a worker a proposer may use."""

    spec: WorkerSpec
    rows: RowTable
    drafter: Drafter | None  # modules that this rank computes
    pages: DraftPages


def make_proposer(parts: ProposerParts) -> DraftProposer:
    """The proposer of spec.speculation; one that proposes nothing without it, and where others draft."""
    spec, speculation = parts.spec, parts.spec.speculation
    if parts.drafter is not None:
        compute = draft_compute(spec.device, parts.drafter, parts.pages.caches)
        propose_by = LoneModuleProposer if len(parts.drafter.modules) == 1 else MtpProposer
        return propose_by(parts.drafter, parts.rows, parts.pages, compute)
    if speculation is not None and speculation.method is DraftMethod.NGRAM and spec.is_sampler:
        from blockferry.engine.spec_decode.ngram import NgramProposer  # loads numba, which GPU workers rarely need

        return NgramProposer(parts.rows, min_ngram=speculation.min_ngram, max_ngram=speculation.max_ngram)
    return NoProposer()
