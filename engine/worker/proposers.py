"""Who drafts tokens on a worker, as its spec says. Owns nothing."""

from __future__ import annotations

import dataclasses

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import DraftProposer, ModuleProposer, NoProposer
from blockferry.engine.spec_decode.drafting import CONFIDENCE
from blockferry.engine.spec_decode.lone_module import LoneModuleProposer
from blockferry.engine.spec_decode.lookup_first import LookupFirst
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
    speculation = parts.spec.speculation
    if speculation is None:
        return NoProposer()
    if parts.drafter is not None:
        lookup = _lookup(parts, speculation) if speculation.looks_up else NoProposer()
        return LookupFirst(lookup, _modules(parts, parts.drafter, speculation))
    if speculation.method is DraftMethod.NGRAM and parts.spec.is_sampler:
        return _lookup(parts, speculation)
    return NoProposer()


def _modules(parts: ProposerParts, drafter: Drafter, speculation: SpeculationConfig) -> ModuleProposer:
    compute = draft_compute(parts.spec.device, drafter, parts.pages.caches)
    propose_by = LoneModuleProposer if len(drafter.modules) == 1 else MtpProposer
    min_chance = CONFIDENCE if speculation.is_adaptive else 0.0
    return propose_by(drafter, parts.rows, parts.pages, compute, min_chance=min_chance)


def _lookup(parts: ProposerParts, speculation: SpeculationConfig) -> DraftProposer:
    from blockferry.engine.spec_decode.ngram import NgramProposer  # loads numba, which GPU workers rarely need

    return NgramProposer(parts.rows, min_ngram=speculation.min_ngram, max_ngram=speculation.max_ngram)
