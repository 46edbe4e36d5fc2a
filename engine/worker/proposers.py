"""Who drafts tokens on a worker, as its spec says. Owns nothing."""

from __future__ import annotations

from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import DraftProposer, NoProposer
from blockferry.engine.worker.spec import WorkerSpec


def make_proposer(spec: WorkerSpec, rows: RowTable) -> DraftProposer:
    """The proposer of spec.speculation, which reads the worker's rows; one that proposes nothing without it."""
    del rows
    assert spec.speculation is None, spec.speculation
    return NoProposer()
