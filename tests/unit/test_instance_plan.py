"""What an instance is told of a pool that is too small."""

import pytest
from support.deployments import LLAMA

from blockferry.engine.errors import PoolTooSmall
from blockferry.engine.kv.instance_plan import InstanceRequest, plan_instance

REQUEST = {"dtype": "float32", "max_model_len": 1024, "max_in_flight_tokens": 512}


def test_a_pool_too_small_for_the_longest_sequence_is_planned_for_a_shorter_one() -> None:
    plan = plan_instance(LLAMA, InstanceRequest(**REQUEST, memory_bytes=1 << 18))
    assert plan.longest == 256


def test_a_pool_too_small_for_any_sequence_is_refused_with_what_the_asked_for_length_takes() -> None:
    with pytest.raises(PoolTooSmall, match=r"max_model_len=1024 .* give the pool"):
        plan_instance(LLAMA, InstanceRequest(**REQUEST, memory_bytes=1 << 10))


@pytest.mark.parametrize("num_draft_layers", [0, 1])
def test_an_instance_that_drafts_has_caches_of_the_layers_that_do(num_draft_layers: int) -> None:
    drafting = {"num_speculative_tokens": 3, "num_draft_layers": num_draft_layers}
    plan = plan_instance(LLAMA, InstanceRequest(**REQUEST, **drafting, memory_bytes=1 << 24))
    assert len(plan.model.draft_layer_ids) == num_draft_layers
    assert any(group.is_draft for group in plan.ledger.groups) == bool(num_draft_layers)
