"""The kernels over paged states against oracles that go token by token.

float16 stands in for bfloat16 where matrices are multiplied: the interpreter multiplies bfloat16 wrongly.
"""

import dataclasses

import pytest
import torch
from support.draft_steps import MIXED_STEP, num_blocks_of, run_both
from support.paged import DEVICE
from support.state_oracles import (
    RECURRENCES,
    make_conv,
    make_delta,
    make_pool,
    make_selective,
    make_ssd,
    make_step,
    run_oracle,
)

from blockferry.engine.models.state_passes import StateOpsInPasses
from blockferry.engine.models.triton_state_ops import TritonStateOps

pytestmark = pytest.mark.triton

OPS = TritonStateOps()
CONV, SELECTIVE, SSD, DELTA = RECURRENCES
each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Several tiles, where there are tiles; what goes token by token is slow to interpret.
LONG = {
    ("causal_conv", torch.float32): 70,
    ("causal_conv", torch.float16): 70,
    ("selective_scan", torch.float32): 19,
    ("selective_scan", torch.float16): 19,
    ("ssd_scan", torch.float32): 12,
    ("ssd_scan", torch.float16): 150,
    ("gated_delta", torch.float32): 12,
    ("gated_delta", torch.float16): 150,
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def to_device(inputs):
    changes = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return type(inputs)(**{name: None if value is None else value.to(DEVICE) for name, value in changes.items()})


def check(recurrence, inputs, state, metadata, dtype=torch.float32):
    """Outputs and the states in the target blocks are the oracle's, as near as dtype allows; state is changed."""
    tolerance = TOLERANCE[dtype]
    expected, expected_state = run_oracle(recurrence, inputs, state, metadata)
    out = recurrence.run(OPS, inputs, state, metadata)
    for actual, wanted in ((out, expected), (state[metadata.target_R], expected_state)):
        scale = wanted.abs().max().clamp_min(1.0)
        torch.testing.assert_close(actual.double() / scale, wanted / scale, atol=tolerance, rtol=tolerance)


def in_dtype(inputs, dtype):
    """What a model of a dtype passes: the activations in it, the rest in float32."""
    names = {"x", "x_TC", "b_TN", "c_TN", "x_THP", "b_TGN", "c_TGN", "q_THK", "k_THK", "v_THV"}
    names &= {field.name for field in dataclasses.fields(inputs)}
    return dataclasses.replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in names})


def random_states(num_blocks, shape, dtype=torch.float32):
    return torch.randn((num_blocks, *shape), generator=generator(7)).to(dtype).to(DEVICE)


@each_recurrence
def test_drafts_are_computed_as_decode_steps_would(recurrence):
    inputs = to_device(recurrence.make(MIXED_STEP.num_tokens, generator()))
    state = random_states(num_blocks_of(6), recurrence.state_shape)
    (out, states), (expected, expected_states) = run_both(
        OPS, StateOpsInPasses(OPS), recurrence, inputs, state, MIXED_STEP, DEVICE
    )
    assert torch.equal(out, expected)
    assert torch.equal(states, expected_states)


@each_recurrence
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0], ids=["decays_last", "decays_mild", "decays_vanish"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixed_step_equals_the_oracle(recurrence, scale, dtype):
    lens = [1, 1, 5, LONG[recurrence.name, dtype], 1]
    metadata = make_step(lens, num_decode_rows=2, fresh=(1, 2), device=DEVICE)
    inputs = to_device(in_dtype(recurrence.make(sum(lens), generator(), scale=scale), dtype))
    check(recurrence, inputs, random_states(5, recurrence.state_shape), metadata, dtype)


@each_recurrence
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_and_states_of_half_precision_are_taken(recurrence, dtype):
    multiplies = recurrence in {SSD, DELTA} and DEVICE == "cpu" and dtype is torch.bfloat16
    metadata = make_step([1] if multiplies else [1, 20], num_decode_rows=1, device=DEVICE)
    inputs = to_device(recurrence.make(metadata.num_tokens, generator()).cast(dtype))
    check(recurrence, inputs, random_states(2, recurrence.state_shape, dtype), metadata, dtype)


@each_recurrence
def test_only_target_blocks_are_written_and_garbage_does_not_leak(recurrence):
    lens = [1, 1, 3, 20]
    metadata = make_step(
        lens, num_decode_rows=2, source=[1, -(10**9), 10**9, 5], target=[1, 3, 4, 7], fresh=(1, 2), device=DEVICE
    )
    inputs = to_device(recurrence.make(sum(lens), generator()))
    pages, state = make_pool(9, recurrence.state_shape, device=DEVICE)
    state[1] = state[5] = 0.5

    check(recurrence, inputs, state, metadata)

    is_written = torch.zeros(pages.shape, dtype=torch.bool)
    is_written[[1, 3, 4, 5, 7], 3 : 3 + state[0].numel()] = True
    assert pages.cpu()[~is_written].isnan().all()
    assert (state[5] == 0.5).all()


@pytest.mark.parametrize(
    ("recurrence", "make", "shape", "sizes"),
    [
        (CONV, make_conv, (300, 2), {"channels": 300, "taps": 3, "has_bias": False}),
        (CONV, make_conv, (5, 1), {"channels": 5, "taps": 2}),
        (SELECTIVE, make_selective, (20, 16), {"channels": 20, "state_size": 16}),
        (SSD, make_ssd, (1, 80, 128), {"heads": 1, "head_dim": 80, "state_size": 128, "groups": 1}),
        (SSD, make_ssd, (2, 16, 256), {"heads": 2, "head_dim": 16, "state_size": 256, "groups": 2}),
        (DELTA, make_delta, (1, 128, 128), {"heads": 1, "key_dim": 128, "value_dim": 128}),
        (DELTA, make_delta, (1, 20, 24), {"heads": 1, "key_dim": 20, "value_dim": 24}),
    ],
)
def test_sizes_of_real_and_of_odd_models_are_tiled(recurrence, make, shape, sizes):
    num_tokens = 18 if recurrence is SELECTIVE else 67
    metadata = make_step([1, 1, num_tokens], num_decode_rows=2, device=DEVICE)
    inputs = to_device(in_dtype(make(2 + num_tokens, generator(), **sizes), torch.float16))
    check(recurrence, inputs, random_states(3, shape), metadata, torch.float16)


def test_keys_that_repeat_do_not_spoil_the_triangular_system():
    metadata = make_step([64], device=DEVICE)
    inputs = make_delta(64, generator(), scale=0.0)
    keys = inputs.k_THK[:1].expand(64, -1, -1).contiguous()
    inputs = dataclasses.replace(inputs, k_THK=keys, beta_TH=torch.ones(64, 2))
    inputs = to_device(in_dtype(inputs, torch.float16))
    check(DELTA, inputs, random_states(1, DELTA.state_shape), metadata, torch.float16)


def test_slices_of_a_projection_are_taken():
    fused = torch.randn(20, 12 + 2 * 10, generator=generator()).to(DEVICE, torch.float16)
    x, b, c = fused.split((12, 10, 10), dim=-1)
    inputs = make_ssd(20, generator())
    strided = dataclasses.replace(
        to_device(inputs),
        x_THP=x.unflatten(-1, (4, 3)),
        b_TGN=b.unflatten(-1, (2, 5)),
        c_TGN=c.unflatten(-1, (2, 5)),
    )
    check(SSD, strided, random_states(1, SSD.state_shape), make_step([20], device=DEVICE), torch.float16)


def test_states_that_are_scattered_inside_a_block_are_refused():
    inputs = to_device(make_conv(1, generator()))
    state = torch.zeros(2, 3, 6, device=DEVICE).transpose(1, 2)[..., :3]
    with pytest.raises(ValueError, match="copy it first"):
        CONV.run(OPS, inputs, state, make_step([1], num_decode_rows=1, device=DEVICE))
    state = torch.zeros(2, 6, 4, device=DEVICE)[..., :3]
    with pytest.raises(ValueError, match=r"strides \(24, 4, 1\), the kernel needs the state of a block in one piece"):
        CONV.run(OPS, inputs, state, make_step([1], num_decode_rows=1, device=DEVICE))


def test_a_window_too_long_for_the_kernel_is_refused():
    inputs = to_device(make_conv(1, generator(), taps=17))
    state = torch.zeros(1, 6, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"17 taps, the kernel takes 2\.\.16"):
        CONV.run(OPS, inputs, state, make_step([1], num_decode_rows=1, device=DEVICE))
