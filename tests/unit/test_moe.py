"""Layers with experts against transformers' own, on random weights in float32, whole and sharded."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.moe_blocks import (
    FAMILIES,
    FEED_FORWARD_SIZE,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    MoeCase,
    float32_placement,
    make_case,
)

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.expert_ops import TorchExpertOps, group_by_expert
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.moe import ClampedSwiglu, Experts, gated_gelu_tanh
from blockferry.engine.models.moe_weights import (
    ExpertNames,
    ExpertShapes,
    ExpertWeights,
    StackedLayout,
    read_experts,
)
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.routing import Routing
from blockferry.engine.models.sharding import RankPlace, Span, split_evenly

SHAPES = ExpertShapes(num_experts=NUM_EXPERTS, hidden_size=HIDDEN_SIZE, feed_forward_size=FEED_FORWARD_SIZE)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> MoeCase:
    return make_case(tmp_path_factory.mktemp("moe"), request.param)


def hidden(num_tokens: int = 37) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))


def test_layer_computes_what_transformers_computes(case):
    torch.testing.assert_close(case.partial(hidden()), case.reference(hidden()), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_summands_of_all_ranks_add_up_to_the_layer(case, tp_size):
    summands = [case.partial(hidden(), RankPlace(tp_rank=rank, tp_size=tp_size)) for rank in range(tp_size)]
    torch.testing.assert_close(sum(summands), case.reference(hidden()), atol=2e-5, rtol=2e-5)


def test_token_alone_gets_what_it_gets_in_a_batch(case):
    layer, x_TE = case.layer().partial, hidden()
    alone = torch.cat([layer(x_TE[token : token + 1]) for token in range(len(x_TE))])
    torch.testing.assert_close(alone, layer(x_TE), atol=2e-5, rtol=2e-5)


def test_infinite_token_leaves_the_others_alone(case):
    layer, x_TE = case.layer(RankPlace(tp_rank=1, tp_size=2)).partial, hidden()
    expected = layer(x_TE)
    x_TE[4] = float("inf")
    keep = torch.arange(len(x_TE)) != 4
    torch.testing.assert_close(layer(x_TE)[keep], expected[keep], atol=2e-5, rtol=2e-5)


def test_rank_none_of_whose_experts_is_chosen_adds_nothing():
    weights = random_weights(Span(start=4, stop=NUM_EXPERTS))
    experts = Experts(weights, ops=TorchExpertOps(), activation=TorchOps().silu_and_mul)
    routing = Routing(expert_ids_TK=torch.tensor([[0, 1], [3, 2]]), weights_TK=torch.ones(2, 2))
    assert experts(hidden(2), routing).count_nonzero() == 0


def test_no_tokens_give_no_rows(case):
    assert case.partial(hidden()[:0]).shape == (0, HIDDEN_SIZE)


def test_result_keeps_the_dtype_of_its_input():
    experts = Experts(
        random_weights(Span(start=0, stop=8), torch.bfloat16), ops=TorchExpertOps(), activation=TorchOps().silu_and_mul
    )
    routing = Routing(expert_ids_TK=torch.tensor([[0, 7]]), weights_TK=torch.ones(1, 2))
    assert experts(hidden(1).bfloat16(), routing).dtype is torch.bfloat16


def test_pairs_of_an_expert_stay_in_the_order_of_their_tokens():
    groups = group_by_expert(torch.tensor([[2, 0], [0, 1], [2, 1]]), Span(start=0, stop=3))
    assert groups.pair_M.tolist() == [1, 2, 3, 5, 0, 4]
    assert groups.starts_X1.tolist() == [0, 2, 4, 6]


def test_pairs_of_other_ranks_are_left_out():
    groups = TorchExpertOps().group(torch.tensor([[2, 0], [0, 1], [2, 1]]), Span(start=1, stop=2))
    assert groups.pair_M.tolist() == [3, 5]


def test_gpt_oss_caps_gates_on_one_side_and_ups_on_both():
    gate_up = torch.tensor([[-9.0, 9.0, 9.0, -9.0]])
    gates = torch.tensor([-9.0, 7.0])
    expected = torch.tensor([8.0, -6.0]) * gates * torch.sigmoid(1.702 * gates)
    torch.testing.assert_close(ClampedSwiglu()(gate_up), expected[None])


def test_gelu_multiplies_the_ups():
    gate_up = torch.tensor([[0.7, 3.0]])
    expected = 3 * torch.nn.functional.gelu(torch.tensor([[0.7]]), approximate="tanh")
    torch.testing.assert_close(gated_gelu_tanh(gate_up), expected)


@pytest.mark.parametrize("layout", StackedLayout)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_stacked_layout_gives_the_same_matrices(tmp_path, layout, rank):
    whole = random_weights(Span(start=0, stop=NUM_EXPERTS))
    save_file(stacked_tensors(whole, layout), tmp_path / "model.safetensors")
    span = split_evenly(NUM_EXPERTS, rank, 3)
    weights = read_experts(
        Checkpoint(tmp_path), ExpertNames(prefix="experts", stacked=layout), SHAPES, span, float32_placement()
    )
    assert torch.equal(weights.gate_up_XGE, whole.gate_up_XGE[span.start : span.stop])
    assert torch.equal(weights.down_XEF, whole.down_XEF[span.start : span.stop])


def test_stacked_rows_are_found_where_a_family_usually_separates(tmp_path):
    case = make_case(tmp_path, "qwen3_moe")
    expected = case.partial(hidden())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".1.mlp.experts." not in name}
    kept["model.layers.1.mlp.experts.gate_up_proj"] = case.block.experts.gate_up_proj.detach()
    kept["model.layers.1.mlp.experts.down_proj"] = case.block.experts.down_proj.detach()
    save_file(kept, tmp_path / "model.safetensors")
    torch.testing.assert_close(case.partial(hidden()), expected)


def test_missing_expert_is_named(tmp_path):
    make_case(tmp_path, "qwen3_moe")
    names = ExpertNames(prefix="model.layers.1.mlp.experts")
    shapes = ExpertShapes(num_experts=9, hidden_size=HIDDEN_SIZE, feed_forward_size=FEED_FORWARD_SIZE)
    with pytest.raises(ModelLoadError, match=r"experts\.8\.gate_proj\.weight"):
        read_experts(Checkpoint(tmp_path), names, shapes, Span(start=0, stop=9), float32_placement())


def test_other_number_of_stacked_experts_is_refused(tmp_path):
    whole = random_weights(Span(start=0, stop=NUM_EXPERTS))
    save_file(stacked_tensors(whole, StackedLayout.ROWS), tmp_path / "model.safetensors")
    shapes = ExpertShapes(num_experts=6, hidden_size=HIDDEN_SIZE, feed_forward_size=FEED_FORWARD_SIZE)
    with pytest.raises(ModelLoadError, match=r"has shape \(8, 40, 32\), config.json says \(6, 40, 32\)"):
        read_experts(
            Checkpoint(tmp_path), ExpertNames(prefix="experts"), shapes, Span(start=0, stop=6), float32_placement()
        )


def random_weights(experts: Span, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    generator = torch.Generator().manual_seed(11)
    gate_up = torch.randn(len(experts), 2 * FEED_FORWARD_SIZE, HIDDEN_SIZE, generator=generator)
    down = torch.randn(len(experts), HIDDEN_SIZE, FEED_FORWARD_SIZE, generator=generator)
    return ExpertWeights(experts=experts, gate_up_XGE=gate_up.to(dtype), down_XEF=down.to(dtype))


def stacked_tensors(weights: ExpertWeights, layout: StackedLayout) -> dict[str, torch.Tensor]:
    gate_up, down = weights.gate_up_XGE, weights.down_XEF
    if layout is StackedLayout.ALTERNATING_COLUMNS:
        gate_up = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if layout is not StackedLayout.ROWS:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return {"experts.gate_up_proj": gate_up.contiguous(), "experts.down_proj": down.contiguous()}
