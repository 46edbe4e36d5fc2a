"""DeepSeek-V3 computes what transformers computes, in float32, in every variant of its config.json."""

import dataclasses

import pytest
import torch
import transformers
from support.dense_step import DenseCaches, dense_logits
from support.moe_blocks import make_build
from support.tiny_families import FAMILIES, build, checkpoint, load_reference, make_prompt, one_thread, reference_logits

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import RopeConfig
from blockferry.engine.models.deepseek import LatentAttention, attention_scale, latent_shape, read_latent_attention
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import Step

FAMILY = FAMILIES["deepseek_v3"]
PROMPT = make_prompt(3, 90)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS = {
    "plain_queries": {"q_lora_rank": None},
    "halves": {"rope_interleave": False},
    "biases": {"attention_bias": True},
    "plain_rope": {"rope_parameters": PLAIN_ROPE},
    "yarn_without_mscale": {"rope_parameters": YARN},
    "yarn_with_equal_mscales": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "two_shared_experts": {"n_shared_experts": 2},
    "one_group": {"n_group": 1, "topk_group": 1},
    "weights_as_they_are": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "all_dense": {"first_k_dense_replace": 4},
    "value_wider_than_key": {"v_head_dim": 28},
}


def _variant(name, folder, changes):
    """The checkpoint of the tiny model with another config.json."""

    def make_config():
        return transformers.DeepseekV3Config(**{**FAMILY.make_config().to_dict(), **changes})

    return build(dataclasses.replace(FAMILY, name=name, make_config=make_config), folder)


def _assert_logits_are_those_of_transformers(folder, *, tp_size=1):
    with one_thread():
        logits = dense_logits(folder, PROMPT, tp_size=tp_size)
    torch.testing.assert_close(logits, reference_logits(folder, PROMPT), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_logits_equal_transformers_on_any_number_of_ranks(tp_size, tmp_path_factory):
    _assert_logits_are_those_of_transformers(checkpoint("deepseek_v3", tmp_path_factory), tp_size=tp_size)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_variant_equal_transformers(name, tmp_path):
    _assert_logits_are_those_of_transformers(_variant(name, tmp_path, VARIANTS[name]), tp_size=2)


def test_attention_alone_equals_transformers(tmp_path):
    folder = _variant("plain_rope", tmp_path, VARIANTS["plain_rope"])
    reference = load_reference(folder).model
    made = make_build(folder, RankPlace())
    parts = read_latent_attention(made, "model.layers.1.self_attn.", latent_shape(made))
    cos_sin = rope_table(RopeConfig(theta=10000.0), head_dim=8, max_len=64)
    rule = AttentionRule(scale=attention_scale(made, parts.shape))
    torch.manual_seed(0)
    x_TE, positions_T = torch.randn(40, 64), torch.arange(40)

    attention = LatentAttention(made, 1, parts, rule, cos_sin=cos_sin)
    with torch.inference_mode():
        out_TE = attention(x_TE.clone(), Step(positions_T=positions_T, caches=DenseCaches()))
        mask = torch.full((1, 1, 40, 40), -torch.inf).triu(1)
        rope = reference.rotary_emb(x_TE[None], positions_T[None])
        expected_TE = reference.layers[1].self_attn(x_TE[None], position_embeddings=rope, attention_mask=mask)[0][0]

    torch.testing.assert_close(out_TE, expected_TE, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_group": 3}, "n_routed_experts=8 do not form n_group=3 equal groups"),
        ({"topk_group": 5}, "topk_group=5 exceeds n_group=4"),
        ({"topk_group": 1}, "num_experts_per_tok=3 exceeds the 2 experts of topk_group=1 groups"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not supported; supported: sigmoid"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, complaint, tmp_path):
    folder = _variant("refused", tmp_path, changes)
    with pytest.raises(ModelLoadError, match=complaint):
        dense_logits(folder, PROMPT)


def test_heads_that_ranks_cannot_share_are_refused(tmp_path_factory):
    with pytest.raises(ModelLoadError, match="4 query heads cannot be shared by 3 ranks"):
        dense_logits(checkpoint("deepseek_v3", tmp_path_factory), PROMPT, tp_size=3)
