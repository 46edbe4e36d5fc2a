"""A prompt served again after some groups' blocks were evicted gives the same tokens: nothing stale is ever read."""

from pathlib import Path

import numpy as np
import pytest
from support.local_engine import EngineOptions, LocalEngine, start_worker
from support.parity_cases import NAMES, WORKLOAD
from support.parity_table import RecordCell
from support.tiny_families import FAMILIES, build

from blockferry.engine.kv.plan import Planner
from blockferry.engine.kv.reach import SpecKind

pytestmark = pytest.mark.slow
LOCAL = {SpecKind.SLIDING_WINDOW, SpecKind.CHUNKED_LOCAL, SpecKind.MAMBA}


@pytest.mark.parametrize("planner", [Planner.UNIFORM, Planner.SLAB])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_after_only_some_groups_were_evicted(
    name: str, planner: Planner, families_folder: Path, record_cell: RecordCell
) -> None:
    path = build(FAMILIES[name], families_folder)
    options = EngineOptions(max_model_len=128, planner=planner)
    engine = LocalEngine(path, options, start_worker(path, options))
    groups = engine.plan.ledger.groups
    local = [number for number, group in enumerate(groups) if group.spec.kind in LOCAL]
    others = [number for number in range(len(groups)) if number not in local]

    assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    for evicted in (local, others):
        for group in evicted:
            engine.kv.evict_blocks(all_blocks(engine, group), group)
        assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    record_cell(name, "part evicted")


def all_blocks(engine: LocalEngine, group: int) -> np.ndarray:
    """Every block that the group has cached."""
    index = engine.kv._index  # which blocks a group has cached is nobody's question but a test's
    return np.unique(index.blocks[:, group][index.blocks[:, group] != 0])
