"""Kernels of layers with experts against their oracles, and behind Experts against torch."""

import pytest
import torch
from support.paged import DEVICE

from blockferry.engine.models.expert_ops import TorchExpertOps
from blockferry.engine.models.moe import Experts, Weighting
from blockferry.engine.models.moe_weights import ExpertWeights
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.routing import softmax_top_k_normalised
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.triton_expert_ops import TritonExpertOps, choose
from blockferry.kernels import moe_combine, moe_grouped_matmul, moe_routing
from blockferry.kernels.moe_routing import Normalisation

pytestmark = pytest.mark.triton

# The interpreter's dot is wrong in bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def _randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _starts(*counts):
    return torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)


def _close(actual, expected):
    tolerance = 1e-5 if actual.dtype is torch.float32 else 4 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"),
    [(128, 64), (40, 100)],  # whole tiles, parts of tiles
)
def test_every_run_of_rows_has_its_experts_matrix(num_inputs, num_outputs, dtype):
    starts = _starts(5, 0, 17, 1)
    x, weight = _randn(23, num_inputs, dtype=dtype), _randn(4, num_outputs, num_inputs, dtype=dtype, seed=1) / 16
    actual = moe_grouped_matmul.grouped_matmul(x, weight, starts_X1=starts)
    _close(actual, moe_grouped_matmul.grouped_matmul_torch(x, weight, starts_X1=starts))


def test_rows_are_gathered_and_biases_added():
    starts, rows = _starts(0, 3, 4), torch.tensor([4, 0, 2, 1, 1, 0, 3], device=DEVICE)
    x, weight, bias = _randn(5, 48), _randn(3, 20, 48, seed=1), _randn(3, 20, seed=2)
    options = {"starts_X1": starts, "bias_XO": bias, "row_M": rows}
    actual = moe_grouped_matmul.grouped_matmul(x, weight, **options)
    _close(actual, moe_grouped_matmul.grouped_matmul_torch(x, weight, **options))


def test_rows_past_the_last_run_cost_nothing_and_harm_nothing():
    starts = _starts(2, 1)
    x, weight = _randn(40, 32), _randn(2, 32, 32, seed=1)
    actual = moe_grouped_matmul.grouped_matmul(x, weight, starts_X1=starts)
    _close(actual[:3], moe_grouped_matmul.grouped_matmul_torch(x, weight, starts_X1=starts)[:3])


def test_expert_with_many_tiles_of_rows_is_computed_whole():
    starts = _starts(1, 150, 2)
    x, weight = _randn(153, 32), _randn(3, 16, 32, seed=1)
    actual = moe_grouped_matmul.grouped_matmul(x, weight, starts_X1=starts)
    _close(actual, moe_grouped_matmul.grouped_matmul_torch(x, weight, starts_X1=starts))


def test_matrix_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"weight is torch\.float16"):
        moe_grouped_matmul.grouped_matmul(_randn(2, 8), _randn(2, 8, 8, dtype=torch.float16), starts_X1=_starts(1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_weights", [True, False])
def test_combination_equals_the_oracle(has_weights, dtype):
    y, num_rows = _randn(9, 1100, dtype=dtype), torch.tensor([7], dtype=torch.int32, device=DEVICE)
    y[7:] = torch.nan  # never read
    rows = torch.tensor([[0, 8, 3], [6, 7, 1], [8, 7, 8]], device=DEVICE)
    weights = _randn(3, 3, seed=1) if has_weights else None
    _close(moe_combine.combine(y, rows, weights, num_rows), moe_combine.combine_torch(y, rows, weights, num_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (6, 3), (5, 5), (512, 1)])
def test_choice_equals_the_oracle(num_experts, num_chosen, normalisation, dtype):
    permutations = torch.stack([torch.randperm(num_experts) for _ in range(19)])
    logits = (permutations / num_experts * 8).to(dtype).to(DEVICE)  # no two alike within a token
    actual = moe_routing.softmax_top_k(logits, num_chosen, normalisation)
    expected = moe_routing.softmax_top_k_torch(logits, num_chosen, normalisation)
    assert torch.equal(actual.expert_ids_TK, expected.expert_ids_TK)
    _close(actual.weights_TK.to(dtype), expected.weights_TK.to(dtype))


def test_of_equal_logits_the_first_are_chosen():
    choice = moe_routing.softmax_top_k(torch.zeros(2, 7, device=DEVICE), 3, Normalisation.OF_ALL)
    assert choice.expert_ids_TK.tolist() == [[0, 1, 2]] * 2


def test_logits_that_are_not_numbers_give_experts_that_exist():
    logits = torch.full((1, 6), torch.nan, device=DEVICE)
    logits[0, 4] = 1.0
    choice = moe_routing.softmax_top_k(logits, 2, Normalisation.OF_CHOSEN)
    assert choice.expert_ids_TK[0, 0] == 4
    assert 0 <= choice.expert_ids_TK[0, 1] < 6


def test_more_chosen_than_there_are_is_refused():
    with pytest.raises(ValueError, match="7 of 6 experts cannot be chosen"):
        moe_routing.softmax_top_k(torch.zeros(1, 6, device=DEVICE), 7, Normalisation.OF_ALL)


@pytest.mark.parametrize("weighting", Weighting)
@pytest.mark.parametrize("experts", [Span(start=0, stop=6), Span(start=2, stop=4)])
def test_experts_compute_with_kernels_what_they_compute_with_torch(experts, weighting):
    num_experts = len(experts)
    weights = ExpertWeights(
        experts=experts,
        gate_up_XGE=_randn(num_experts, 40, 32, seed=1),
        gate_up_bias_XG=_randn(num_experts, 40, seed=2),
        down_XEF=_randn(num_experts, 32, 20, seed=3),
        down_bias_XE=_randn(num_experts, 32, seed=4),
    )
    x_TE, logits_TX = _randn(13, 32), _randn(13, 6, seed=5)
    actual, expected = (
        Experts(weights, ops=ops, activation=TorchOps().silu_and_mul, weighting=weighting)(x_TE, routing)
        for ops, routing in (
            (TritonExpertOps(), choose(logits_TX, 2, Normalisation.OF_CHOSEN)),
            (TorchExpertOps(), softmax_top_k_normalised(logits_TX, num_chosen=2)),
        )
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
