"""The ledger against recorded behaviour of vLLM 0.33: every family at level contract, and strictly but for those below.

Strict means: block ids in order, distinct cached keys, copies, blocks to clear and events agree too. Different on
purpose:

    eagle-full+swa-bs      the hit of a draft group with smaller blocks is longer here: the recorded search gives up
                           whole blocks to stay aligned, the one here finds the longest hit there is
    eagle-draftgroup-0     a draft's group and its target's have one spec; the recorded search asks both for the block
                           that only the draft computes again, the one here finds a hit of one block more
    events-mamba-partial   a stored event names just the tokens of the states that were stored, and their parent;
                           the recorded one spans the null blocks before them
"""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from blockferry.engine.kv.replay_traces import ReplayLevel, replay_trace

TRACES = json.loads(lzma.decompress((Path(__file__).parent / "kv_traces.json.xz").read_bytes()))["traces"]
DIFFERENT_ON_PURPOSE = {"eagle-full+swa-bs", "eagle-draftgroup-0", "events-mamba-partial"}


def level_of(trace: dict[str, Any]) -> ReplayLevel:
    name = str(trace["id"])
    is_different = not DIFFERENT_ON_PURPOSE.isdisjoint({name, name.rpartition("-")[0]})
    return ReplayLevel.CONTRACT if is_different else ReplayLevel.STRICT


def test_nearly_all_traces_are_replayed_strictly() -> None:
    levels = [level_of(trace) for trace in TRACES]
    assert (len(levels), levels.count(ReplayLevel.STRICT)) == (364, 354)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: str(trace["id"]))
def test_ledger_agrees_with_the_recorded_trace(trace: dict[str, Any]) -> None:
    assert replay_trace(trace, level_of(trace)) is None
