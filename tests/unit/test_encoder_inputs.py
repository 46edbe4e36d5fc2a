"""What schedulers and wire make of an encoder's input beside a prompt: refusals, room, hashes, rows sent again."""

import numpy as np
import pytest
from support.local_engine import make_request

from blockferry.cluster.messages import request_from
from blockferry.connectors.base import TransferMode
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.errors import RequestRejected
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_hash import encoder_key, salt_key
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.reach import EncoderReach, KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import NewRow, StepPlan, StepResult, pack, plan_from_bytes

MAX_ENCODER_TOKENS = 12
BLOCK_SIZE = 4
PROMPT = [2]


def make_instance(*, has_encoder: bool = True, num_blocks: int = 20, name: str = "m", budget: int = 16) -> Instance:
    self_spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=4))
    cross_spec = AttentionSpec(block_size=BLOCK_SIZE, content=self_spec.content, reach=EncoderReach())
    specs = [self_spec, cross_spec][: 1 + has_encoder]
    groups = tuple(KVCacheGroup(layer_ids=(number,), spec=spec) for number, spec in enumerate(specs))
    rows = RowTable(max_rows=4, max_model_len=32)
    kv = KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, groups=groups, hash_block_size=BLOCK_SIZE),
        rows,
        options=LedgerOptions(watermark=0.0, max_num_encoder_tokens=MAX_ENCODER_TOKENS),
    )
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, num_steps_in_flight=1)
    return Instance(name, Role.MIXED, config=config, kv=kv, rows=rows)


def add(central: CentralScheduler, handle: int, encoder_input: list[int] | None, prompt: list[int] = PROMPT) -> None:
    central.add(make_request(handle, prompt, 4, encoder_input=encoder_input), Route(prefill="m", decode="m"))


def rejection(instance: Instance, encoder_input: list[int] | None) -> str:
    with pytest.raises(RequestRejected) as caught:
        add(CentralScheduler([instance]), 1, encoder_input)
    return str(caught.value)


def sample(central: CentralScheduler, plan: StepPlan) -> None:
    tokens = np.full(int(plan.sample.sum()), 5, np.int32)
    central.commit("m", StepResult(step_id=plan.step_id, token_ids=tokens))
    central.check_integrity()


def test_input_longer_than_the_encoder_is_refused():
    words = rejection(make_instance(), [5] * (MAX_ENCODER_TOKENS + 1))
    assert "the encoder's input has 13 tokens, the model's encoder reads 1 to 12; send an input of that length" in words


def test_empty_input_is_refused():
    assert "the encoder's input has 0 tokens" in rejection(make_instance(), [])


def test_request_without_an_input_is_refused_where_there_is_an_encoder():
    assert "nothing is sent for its encoder; send encoder_token_ids" in rejection(make_instance(), None)


def test_input_is_refused_where_there_is_no_encoder():
    words = rejection(make_instance(has_encoder=False), [5, 6])
    assert "2 tokens are sent for an encoder, which the model lacks; send them as the prompt" in words


def test_input_that_the_pool_can_never_hold_beside_the_prompt_is_refused():
    words = rejection(make_instance(num_blocks=1 + 3), [5] * MAX_ENCODER_TOKENS)
    assert "needs KV blocks for 1 tokens beside the encoder's 12, but the pool of instance m" in words


def test_room_counts_the_blocks_of_the_input_that_is_sent():
    room = make_instance().kv.room
    assert room.to_hold(9, None, 5) == 3 + 2
    assert room.to_hold(9, None, MAX_ENCODER_TOKENS) == 3 + 3


def test_whole_input_is_held_from_the_first_chunk_on_and_freed_at_the_end():
    instance = make_instance()
    central = CentralScheduler([instance])
    add(central, 1, [5] * 9)
    sample(central, central.plan("m"))
    assert instance.kv.num_blocks(int(np.flatnonzero(instance.rows.num_tokens)[0]), group=1) == 3
    while (plan := central.plan("m")) is not None:
        sample(central, plan)
    assert instance.kv.num_free_blocks == instance.kv.num_usable_blocks


def test_inputs_of_newcomers_are_taken_from_the_steps_budget():
    central = CentralScheduler([make_instance(budget=16, num_blocks=100)])
    for handle in range(4):
        add(central, handle, [5 + handle] * 10)
    assert len(central.plan("m").rows) == 2  # the first one leaves 5 tokens, which the second one overdraws


def test_preempted_row_is_sent_with_its_input_again():
    instance = make_instance()
    central = CentralScheduler([instance])
    add(central, 1, [5, 6, 7])
    sample(central, central.plan("m"))
    instance.preempt(next(sequence for sequence in instance.batch.sequences if sequence is not None))
    (new_row,) = central.plan("m").new_rows
    assert new_row.encoder_token_ids.tolist() == [5, 6, 7]
    assert (new_row.num_encoder_tokens, new_row.token_ids.tolist()) == (3, [2, 5])


def test_equal_prompts_of_different_inputs_have_no_hash_in_common():
    kv = make_instance().kv
    prompt = np.arange(8, dtype=np.int32)
    inputs = [None, np.array([5], np.int32), np.array([5, 6], np.int32)]
    digests = [kv.hash_prompt(prompt, extra_keys=encoder_key(one)).digests for one in inputs]
    assert len({digest for chain in digests for digest in chain}) == 3 * 2


def test_input_is_no_salt():
    (key,) = encoder_key(np.array([5], np.int32))
    (salt,) = salt_key("x")
    assert key.kind is not salt.kind


def test_rows_travel_with_and_without_an_input():
    sampling = make_request(1, PROMPT, 4).sampling
    rows = [
        NewRow(row=row, token_ids=np.array(PROMPT, np.int32), num_prompt_tokens=1, sampling=sampling, **fields)
        for row, fields in enumerate(
            [{}, {"num_encoder_tokens": 2, "encoder_token_ids": np.array([5, 6], np.int32)}, {"num_encoder_tokens": 2}]
        )
    ]
    again = plan_from_bytes(pack(StepPlan(step_id=0, new_rows=tuple(rows)))).new_rows
    assert [row.num_encoder_tokens for row in again] == [0, 2, 2]
    assert [None if row.encoder_token_ids is None else row.encoder_token_ids.tolist() for row in again] == [
        None,
        [5, 6],
        None,
    ]


@pytest.mark.parametrize("encoder_input", [None, [5, 6]])
def test_requests_travel_with_and_without_an_input(encoder_input):
    request = request_from(pack(make_request(1, PROMPT, 4, encoder_input=encoder_input)))
    found = request.encoder_token_ids
    assert (None if found is None else found.tolist()) == encoder_input


def test_instances_with_encoders_may_hand_over():
    instances = [make_instance(name=name) for name in ("p", "d")]
    CentralScheduler(instances, connector=PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=1.0))
