"""Routers against transformers' own modules, in the dtype of the model, and what no oracle shows."""

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.jamba.modeling_jamba import JambaTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from blockferry.engine.models.routing import (
    GroupLimits,
    sigmoid_grouped_top_k,
    softmax_top_k,
    softmax_top_k_normalised,
    top_k_sigmoid,
    top_k_softmax,
)

HIDDEN_SIZE, NUM_EXPERTS, NUM_CHOSEN, NUM_TOKENS = 24, 16, 4, 65
COMMON = {"hidden_size": HIDDEN_SIZE, "num_experts_per_tok": NUM_CHOSEN}
QWEN = COMMON | {"num_experts": NUM_EXPERTS}
LOCAL = COMMON | {"num_local_experts": NUM_EXPERTS}
GROUPS = COMMON | {"n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2}


def qwen3_moe():
    return Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**QWEN, norm_topk_prob=True)), softmax_top_k_normalised


def qwen3_moe_plain():
    return Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**QWEN, norm_topk_prob=False)), softmax_top_k


def jamba():
    return JambaTopKRouter(transformers.JambaConfig(**QWEN)), softmax_top_k


def gpt_oss():
    return GptOssTopKRouter(transformers.GptOssConfig(**LOCAL)), top_k_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [qwen3_moe, qwen3_moe_plain, jamba, gpt_oss])
def test_choice_and_weights_are_those_of_transformers(make, dtype):
    module, route = make()
    randomise(module)
    logits, weights, expert_ids = module.to(dtype)(hidden(dtype))
    routing = route(logits, num_chosen=NUM_CHOSEN)
    assert torch.equal(routing.expert_ids_TK, expert_ids)
    assert torch.equal(routing.weights_TK, weights.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chosen", [1, 2])
def test_llama4_scores_are_those_of_transformers(num_chosen, dtype):
    module = Llama4Router(transformers.Llama4TextConfig(**LOCAL | {"num_experts_per_tok": num_chosen}))
    randomise(module)
    scores, logits = module.to(dtype)(hidden(dtype))
    routing = top_k_sigmoid(logits, num_chosen=num_chosen)
    dense = torch.zeros_like(scores, dtype=torch.float32).scatter(1, routing.expert_ids_TK, routing.weights_TK)
    assert torch.equal(dense, scores.float())


@pytest.mark.parametrize("is_normalised", [True, False])
def test_deepseek_choice_and_weights_are_those_of_transformers(is_normalised):
    config = transformers.DeepseekV3Config(**GROUPS, norm_topk_prob=is_normalised, routed_scaling_factor=2.5)
    module = DeepseekV3TopkRouter(config)
    randomise(module)
    logits, weights, expert_ids = module(hidden(torch.float32))
    limits = deepseek_limits(is_normalised)
    routing = sigmoid_grouped_top_k(logits, bias_X=module.e_score_correction_bias, limits=limits)
    assert torch.equal(routing.expert_ids_TK, expert_ids)
    assert torch.equal(routing.weights_TK, weights)


def test_deepseek_chooses_from_the_best_groups_only():
    logits = torch.full((1, NUM_EXPERTS), -4.0)
    logits[0, [0, 1, 4, 5]] = 2.0
    logits[0, 8] = 9.0  # the best expert of all, alone in its group
    routing = sigmoid_grouped_top_k(logits, bias_X=torch.zeros(NUM_EXPERTS), limits=deepseek_limits())
    assert sorted(routing.expert_ids_TK[0].tolist()) == [0, 1, 4, 5]


def test_deepseek_correction_changes_the_choice_but_not_the_weights():
    bias = torch.zeros(NUM_EXPERTS)
    bias[:4] = 5.0
    routing = sigmoid_grouped_top_k(torch.zeros(1, NUM_EXPERTS), bias_X=bias, limits=deepseek_limits())
    assert sorted(routing.expert_ids_TK[0].tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(routing.weights_TK, torch.full((1, NUM_CHOSEN), 2.5 / NUM_CHOSEN))


@pytest.mark.parametrize("route", [softmax_top_k, softmax_top_k_normalised, top_k_softmax, top_k_sigmoid])
def test_token_is_routed_alike_alone_and_in_a_batch(route):
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))
    batch, alone = route(logits, num_chosen=NUM_CHOSEN), route(logits[7:8], num_chosen=NUM_CHOSEN)
    assert torch.equal(batch.expert_ids_TK[7:8], alone.expert_ids_TK)
    assert torch.equal(batch.weights_TK[7:8], alone.weights_TK)


def deepseek_limits(is_normalised=True):
    return GroupLimits(num_groups=4, num_chosen_groups=2, num_chosen=NUM_CHOSEN, scale=2.5, is_normalised=is_normalised)


def randomise(module):
    torch.manual_seed(9)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_()


def hidden(dtype):
    return torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5)).to(dtype)
