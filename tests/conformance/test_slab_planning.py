"""The slab planner on every recorded planning case: hardly any waste, and never fewer tokens than was recorded."""

import dataclasses
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from blockferry.engine.kv.replay_planning import request_of
from blockferry.engine.kv.slab_planner import plan_slab

DOCUMENT: dict[str, Any] = json.loads(lzma.decompress((Path(__file__).parent / "planning.json.xz").read_bytes()))


@pytest.mark.parametrize("case", DOCUMENT["cases"], ids=lambda case: str(case["id"]))
def test_slab_plan_is_useful_and_holds_no_less_than_the_recorded_one(case: dict[str, Any]) -> None:
    # slabs need blocks outermost; cases recorded with layers outermost are asked again with the other layout
    request = dataclasses.replace(request_of(case), layout="BLHNC")
    plan = plan_slab(request)
    assert plan.useful_fraction >= 0.99
    assert plan.capacity_tokens >= case["out"].get("capacity_tokens", 0)
    assert plan.slab is not None
    assert plan.pool_bytes == plan.slab.pool_bytes <= request.memory_bytes
