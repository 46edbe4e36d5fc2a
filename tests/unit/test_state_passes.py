"""Recurrent layers over drafts: every token's output and state are those of plain decode steps, bit for bit."""

import dataclasses

import pytest
import torch
from support.draft_steps import MIXED_STEP, DraftStep, num_blocks_of, run_both
from support.state_oracles import RECURRENCES, make_conv, make_delta, make_selective, make_ssd

from blockferry.engine.models.state_passes import StateOpsInPasses
from blockferry.engine.models.torch_state_ops import TorchStateOps

OPS = TorchStateOps()
VERIFYING = StateOpsInPasses(OPS)
each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# as large as vector and matrix units like them; one matrix per row is multiplied otherwise than several
CONV, SELECTIVE, SSD, DELTA = RECURRENCES
WIDE = [
    (CONV, lambda n, g: make_conv(n, g, channels=96), (96, 3)),
    (SELECTIVE, lambda n, g: make_selective(n, g, channels=96, state_size=16), (96, 16)),
    (SSD, lambda n, g: make_ssd(n, g, heads=8, head_dim=32, state_size=64), (8, 32, 64)),
    (SSD, lambda n, g: make_ssd(n, g, heads=8, head_dim=32, state_size=64, groups=1), (8, 32, 64)),
    (DELTA, lambda n, g: make_delta(n, g, heads=4, key_dim=32, value_dim=48), (4, 32, 48)),
    (DELTA, lambda n, g: make_delta(n, g, heads=1, key_dim=32, value_dim=48), (1, 32, 48)),
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def in_dtype(inputs, dtype):
    """What a model of a dtype passes: the activations in it, the rest in float32."""
    names = {"x", "weight", "bias", "x_TC", "b_TN", "c_TN", "x_THP", "b_TGN", "c_TGN", "q_THK", "k_THK", "v_THV"}
    names &= {field.name for field in dataclasses.fields(inputs)}
    return dataclasses.replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in names})


@pytest.mark.parametrize(("recurrence", "make", "shape"), WIDE)
@each_dtype
def test_drafts_are_computed_as_decode_steps_would(recurrence, make, shape, dtype):
    inputs = in_dtype(make(MIXED_STEP.num_tokens, generator()), dtype)
    state = torch.randn((num_blocks_of(6), *shape), generator=generator(7)).to(dtype)
    (out, states), (expected, expected_states) = run_both(OPS, VERIFYING, recurrence, inputs, state, MIXED_STEP)
    assert torch.equal(out, expected)
    assert torch.equal(states, expected_states)


@each_recurrence
def test_a_step_without_drafts_is_one_pass(recurrence):
    step = DraftStep(computed=(5, 8, 0), known_lens=(1, 1, 5), num_drafts=(0, 0, 0))
    inputs = recurrence.make(step.num_tokens, generator())
    state = torch.randn((num_blocks_of(3), *recurrence.state_shape), generator=generator(7))
    again = state.clone()
    metadata = step.metadata()
    assert metadata.tokens_t is None
    assert not metadata.later_passes
    out = recurrence.run(VERIFYING, inputs, state, metadata)
    assert torch.equal(out, recurrence.run(OPS, inputs, again, metadata))
    assert torch.equal(state, again)
