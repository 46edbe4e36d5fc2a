"""The ledger against recorded behaviour of vLLM 0.33 (full-attention families), level strict.

Strict means: refusals, hits, block ids in order, free blocks, distinct cached keys and events all agree.
Families that are not in the file, and why:

    eagle-*                     draft groups drop the last matched block; they come with speculative decoding
    full+full                   two block sizes: vLLM caches to their LCM and keys partial blocks, both part of
                                the hybrid coordinator
    hash-lookahead*             hashes over draft lookahead are deliberately not built (one hash per block)
    reset-evict, deferred-free, nocache, hash-finer, inflight-*, external-hybrid, ...
                                their traces hold a sliding-window, chunked or Mamba group; those types
                                join behind the same interfaces later, and bring their families along
"""

from pathlib import Path
from typing import Any

import pytest
from support.kv_replay import TraceReplay, family_of, load_traces

TRACES = load_traces(Path(__file__).parent / "full_traces.json.xz")
FAMILIES = {
    "dcp2-full": 4,
    "events-full": 4,
    "external": 7,
    "external-delay": 8,
    "fit": 6,
    "full": 8,
    "full-bs16": 4,
    "full-tinypool": 7,
    "lookahead": 6,
    "lookahead-maxlen": 3,
    "reserved": 4,
    "salt": 4,
    "watermark": 7,
}


def test_every_expected_family_is_recorded() -> None:
    counts: dict[str, int] = {}
    for trace in TRACES:
        counts[family_of(trace)] = counts.get(family_of(trace), 0) + 1
    assert counts == FAMILIES


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: str(trace["id"]))
def test_ledger_agrees_with_the_recorded_trace(trace: dict[str, Any]) -> None:
    assert TraceReplay(trace).run() is None
