"""Who drafts tokens on a worker, as its spec says. Owns nothing."""

from __future__ import annotations

from blockferry.engine.config import DraftMethod
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import DraftProposer, NoProposer
from blockferry.engine.worker.spec import WorkerSpec


def make_proposer(spec: WorkerSpec, rows: RowTable) -> DraftProposer:
    """The proposer of spec.speculation, which reads the worker's rows; one that proposes nothing without it."""
    speculation = spec.speculation
    if speculation is not None and speculation.method is DraftMethod.NGRAM and spec.is_sampler:
        from blockferry.engine.spec_decode.ngram import NgramProposer  # loads numba, which GPU workers rarely need

        return NgramProposer(rows, min_ngram=speculation.min_ngram, max_ngram=speculation.max_ngram)
    return NoProposer()
