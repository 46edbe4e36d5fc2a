"""The recurrences in plain torch against oracles that go token by token, and against those of transformers."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from transformers.models.jamba import modeling_jamba
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from blockferry.engine.models.torch_state_ops import CHUNK_SIZE, TorchStateOps

OPS = TorchStateOps()
each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_states(num_blocks, recurrence, dtype=torch.float32):
    return torch.randn((num_blocks, *recurrence.state_shape), generator=generator(7)).to(dtype)


def assert_near(actual, expected, tolerance=2e-5):
    scale = expected.abs().max().clamp_min(1.0)
    torch.testing.assert_close(actual.double() / scale, expected.double() / scale, atol=tolerance, rtol=tolerance)


@each_recurrence
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0], ids=["decays_last", "decays_mild", "decays_vanish"])
def test_a_mixed_step_equals_the_oracle(recurrence, scale):
    metadata = make_step([1, 1, 1, 5, CHUNK_SIZE, 2 * CHUNK_SIZE + 9, 1], num_decode_rows=3, fresh=(1, 4))
    inputs = recurrence.make(metadata.num_tokens, generator(), scale=scale)
    state = random_states(7, recurrence)
    expected, expected_state = run_oracle(recurrence, inputs, state, metadata)

    out = recurrence.run(OPS, inputs, state, metadata)

    assert_near(out, expected)
    assert_near(state, expected_state)


@each_recurrence
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_chunking_of_a_prompt_gives_the_same(recurrence, data):
    lens = data.draw(st.lists(st.integers(1, CHUNK_SIZE + 9), min_size=1, max_size=4))
    inputs = recurrence.make(sum(lens), generator(), scale=data.draw(st.sampled_from([0.01, 1.0, 30.0])))
    state = random_states(1, recurrence)
    expected, expected_state = run_oracle(recurrence, inputs, state, make_step([sum(lens)]))
    outputs, begin = [], 0
    for num_tokens in lens:
        step = make_step([num_tokens], num_decode_rows=int(num_tokens == 1))
        outputs.append(recurrence.run(OPS, inputs.tokens(begin, begin + num_tokens), state, step))
        begin += num_tokens

    assert_near(torch.cat(outputs), expected)
    assert_near(state[0], expected_state[0])


@each_recurrence
def test_float64_inputs_are_computed_in_float64(recurrence):
    metadata = make_step([1, 3 * CHUNK_SIZE], num_decode_rows=1)
    inputs = recurrence.make(metadata.num_tokens, generator()).cast(torch.float64)
    state = random_states(2, recurrence, torch.float64)
    expected, expected_state = run_oracle(recurrence, inputs, state, metadata)

    out = recurrence.run(OPS, inputs, state, metadata)

    assert out.dtype is torch.float64
    assert_near(out, expected, tolerance=1e-12)
    assert_near(state, expected_state, tolerance=1e-12)


@each_recurrence
def test_bfloat16_states_are_rounded_once_a_step(recurrence):
    metadata = make_step([1, 2 * CHUNK_SIZE], num_decode_rows=1)
    inputs = recurrence.make(metadata.num_tokens, generator())
    state = random_states(2, recurrence, torch.bfloat16)
    wide = state.float()
    out_wide = recurrence.run(OPS, inputs, wide, metadata)

    out = recurrence.run(OPS, inputs, state, metadata)

    assert torch.equal(out, out_wide)
    assert torch.equal(state, wide.bfloat16())


@each_recurrence
def test_outputs_have_the_dtype_of_the_inputs(recurrence):
    metadata = make_step([1, 9], num_decode_rows=1)
    inputs = recurrence.make(metadata.num_tokens, generator()).cast(torch.bfloat16)
    state = random_states(2, recurrence)
    expected, _ = run_oracle(recurrence, inputs, state, metadata)

    out = recurrence.run(OPS, inputs, state, metadata)

    assert out.dtype is torch.bfloat16
    assert_near(out, expected, tolerance=1e-2)


@each_recurrence
def test_a_row_does_not_depend_on_the_others_of_its_step(recurrence):
    lens = [1] * 9 + [70, 70, 1, 130]
    inputs = recurrence.make(sum(lens), generator())
    state = random_states(len(lens), recurrence)
    alone = state.clone()

    out = recurrence.run(OPS, inputs, state, make_step(lens, num_decode_rows=9))

    begin = 0
    for row, num_tokens in enumerate(lens):
        step = make_step([num_tokens], num_decode_rows=int(row < 9), source=[row], target=[row])
        row_out = recurrence.run(OPS, inputs.tokens(begin, begin + num_tokens), alone, step)
        assert torch.equal(out[begin : begin + num_tokens], row_out)
        begin += num_tokens
    assert torch.equal(state, alone)


@each_recurrence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_target_blocks_are_written(recurrence, dtype):
    metadata = make_step([1, 1, 8, 8], num_decode_rows=2, source=[1, 2, 4, 5], target=[1, 3, 4, 7])
    inputs = recurrence.make(metadata.num_tokens, generator())
    pages, state = make_pool(9, recurrence.state_shape, dtype=dtype, fill=0.5)
    before = pages.clone()

    recurrence.run(OPS, inputs, state, metadata)

    is_state = torch.zeros(pages.shape, dtype=torch.bool)
    is_state[[1, 3, 4, 7], 3 : 3 + state[0].numel()] = True
    assert torch.equal(pages[~is_state], before[~is_state])
    assert not (pages == before)[is_state].all()


@each_recurrence
def test_garbage_in_unused_blocks_and_before_fresh_rows_does_not_leak(recurrence):
    metadata = make_step([1, 1, 6, 70], num_decode_rows=2, source=[-1, 2, 10**6, 4], target=[1, 3, 5, 6], fresh=(0, 2))
    metadata_zero = make_step([1, 1, 6, 70], num_decode_rows=2, source=[0, 2, 0, 4], target=[1, 3, 5, 6])
    inputs = recurrence.make(metadata.num_tokens, generator())
    _, state = make_pool(7, recurrence.state_shape)
    state[2] = state[4] = 0.5
    _, state_zero = make_pool(7, recurrence.state_shape, fill=0.0)
    state_zero[2] = state_zero[4] = 0.5

    out = recurrence.run(OPS, inputs, state, metadata)

    assert torch.equal(out, recurrence.run(OPS, inputs, state_zero, metadata_zero))
    assert torch.equal(state[[1, 3, 5, 6]], state_zero[[1, 3, 5, 6]])


def test_a_decode_step_of_many_wide_rows_equals_the_oracle():
    recurrence = RECURRENCES[3]
    metadata = make_step([1] * 12, num_decode_rows=12, fresh=(5,))
    inputs = make_delta(12, generator(), heads=8, key_dim=64, value_dim=64)
    state = torch.randn((12, 8, 64, 64), generator=generator(7))
    expected, expected_state = run_oracle(recurrence, inputs, state, metadata)

    out = OPS.gated_delta(inputs, state_BHKV=state, metadata=metadata)

    assert_near(out, expected)
    assert_near(state, expected_state)


def test_strided_slices_of_a_projection_are_taken():
    x, b, c = torch.randn(20, 3 * 8, generator=generator()).split(8, dim=-1)
    inputs = make_selective(20, generator(), channels=8, state_size=8)
    strided = dataclasses.replace(inputs, x_TC=x, b_TN=b, c_TN=c)
    packed = dataclasses.replace(inputs, x_TC=x.contiguous(), b_TN=b.contiguous(), c_TN=c.contiguous())
    state = torch.zeros(2, 1, 8, 8)

    out = OPS.selective_scan(strided, state_BCN=state[0], metadata=make_step([20]))

    assert torch.equal(out, OPS.selective_scan(packed, state_BCN=state[1], metadata=make_step([20])))
    assert torch.equal(state[0], state[1])


def test_the_short_convolution_is_that_of_lfm2():
    inputs = make_conv(33, generator(), channels=16, taps=3)
    state = torch.zeros(1, 16, 2)
    theirs = modeling_lfm2.causal_conv1d_fn(inputs.x.t()[None], inputs.weight, inputs.bias)

    ours = OPS.causal_conv(inputs.x, inputs.weight, inputs.bias, state_BCw=state, metadata=make_step([33], fresh=(0,)))

    assert_near(ours, theirs[0].t())
    assert torch.equal(state[0], inputs.x[-2:].t())


def test_the_convolution_of_one_token_is_that_of_lfm2():
    inputs = make_conv(4, generator(), channels=16, taps=3, has_bias=False)
    state = torch.randn((4, 16, 2), generator=generator(1))
    their_state = state.clone()
    theirs = modeling_lfm2.causal_conv1d_update(inputs.x[..., None], their_state, inputs.weight)

    ours = OPS.causal_conv(
        inputs.x, inputs.weight, None, state_BCw=state, metadata=make_step([1] * 4, num_decode_rows=4)
    )

    assert_near(ours, theirs[..., 0])
    assert torch.equal(state, their_state)


def test_the_selective_scan_is_that_of_jamba():
    inputs = make_selective(100, generator(), channels=16, state_size=8)
    state = torch.zeros(1, 16, 8)
    theirs, their_state = modeling_jamba.mamba_selective_scan(
        *(x.t()[None] for x in (inputs.x_TC, inputs.dt_TC)),
        inputs.a_CN,
        *(x.t()[None] for x in (inputs.b_TN, inputs.c_TN)),
        D=inputs.d_C,
        return_last_state=True,
    )

    ours = OPS.selective_scan(inputs, state_BCN=state, metadata=make_step([100], fresh=(0,)))

    assert_near(ours, theirs[0].t())
    assert_near(state, their_state)


def test_the_selective_scan_of_one_token_is_that_of_jamba():
    inputs = make_selective(4, generator(), channels=16, state_size=8)
    state = torch.randn((4, 16, 8), generator=generator(1))
    their_state = state.clone()
    theirs = modeling_jamba.mamba_selective_state_update(
        their_state, inputs.x_TC, inputs.dt_TC, inputs.a_CN, inputs.b_TN, inputs.c_TN, D=inputs.d_C
    )

    ours = OPS.selective_scan(inputs, state_BCN=state, metadata=make_step([1] * 4, num_decode_rows=4))

    assert_near(ours, theirs)
    assert_near(state, their_state)


def test_the_ssd_scan_is_that_of_mamba2():
    inputs = make_ssd(100, generator(), heads=4, head_dim=8, state_size=16, groups=2)
    state = torch.randn((1, 4, 8, 16), generator=generator(1))
    theirs, their_state = modeling_mamba2.mamba2_chunk_scan(
        *(x[None] for x in (inputs.x_THP, inputs.dt_TH)),
        inputs.a_H,
        *(x[None] for x in (inputs.b_TGN, inputs.c_TGN)),
        chunk_size=32,
        D=inputs.d_H,
        initial_states=state.clone(),
        return_final_states=True,
    )

    ours = OPS.ssd_scan(inputs, state_BHPN=state, metadata=make_step([100]))

    assert_near(ours, theirs[0])
    assert_near(state, their_state)


def test_the_ssd_scan_of_one_token_is_that_of_mamba2():
    inputs = make_ssd(4, generator(), heads=4, head_dim=8, state_size=16, groups=2)
    state = torch.randn((4, 4, 8, 16), generator=generator(1))
    their_state = state.clone()
    theirs = modeling_mamba2.mamba2_selective_state_update(
        their_state,
        inputs.x_THP,
        inputs.dt_TH[..., None].expand(-1, -1, 8),
        inputs.a_H[:, None, None].expand(-1, 8, 16),
        inputs.b_TGN,
        inputs.c_TGN,
        D=inputs.d_H[:, None].expand(-1, 8),
    )

    ours = OPS.ssd_scan(inputs, state_BHPN=state, metadata=make_step([1] * 4, num_decode_rows=4))

    assert_near(ours, theirs)
    assert_near(state, their_state)


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_gated_delta_rule_is_that_of_qwen3_next(form):
    inputs = make_delta(100, generator(), heads=2, key_dim=16, value_dim=24)
    state = torch.randn((1, 2, 16, 24), generator=generator(1))
    rule = {
        "torch_chunk_gated_delta_rule": modeling_qwen3_next.torch_chunk_gated_delta_rule,
        "torch_recurrent_gated_delta_rule": modeling_qwen3_next.torch_recurrent_gated_delta_rule,
    }[form]
    theirs, their_state = rule(
        inputs.q_THK[None] * 16**0.5,  # theirs scales
        *(x[None] for x in (inputs.k_THK, inputs.v_THV, inputs.log_decay_TH, inputs.beta_TH)),
        initial_state=state.clone(),
        output_final_state=True,
    )

    ours = OPS.gated_delta(inputs, state_BHKV=state, metadata=make_step([100]))

    assert_near(ours, theirs[0])
    assert_near(state, their_state)


def test_every_case_of_the_benchmark_runs_at_a_small_size():
    spec = importlib.util.spec_from_file_location("bench_states", Path(__file__).parents[1] / "bench/bench_states.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    layers = [bench.conv_layer(6, 3), bench.selective_layer(4, 3), bench.ssd_layer(2, 4, 6), bench.delta_layer(2, 4)]
    assert [layer.name for layer in layers] == [recurrence.name for recurrence in RECURRENCES]
    for layer in layers:
        for sizes in ((9, 1), (3, 3)):
            assert len(bench.time_on_cpu(layer, *sizes).runs) == bench.CPU_RUNS
