"""DeepSeek-V3: latent attention in its absorbed form, and experts chosen within groups beside a shared one.

All heads read one latent per token, so keys and values are never made: what would make them is applied to the queries
and to the attended latents instead (DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C).

    x --+-- q_a -- norm -- q_b --+-- q_nope -- W_UK of each head --+
        |                        +-- q_rot -- rotate --------------+-- q [T, H, C + W] --+
        |                                                                                attend -- W_UV -- out
        +-- kv_a --+-- norm -------------------+                                         |
                   +-- k_rot -- rotate --------+-- latent [T, C + W], its C the value ---+

Query heads are shared among ranks, latents lie on every one. Rows of projections are reordered once when they are
read, so that rotation pairs halves, and what is rotated of all heads lies together.

Legend: T tokens, E hidden, H this rank's query heads, N dims of a head that are not rotated, W rotated ones, V value
dims of a head, C dims of the latent without rotated ones, R = C + W, A dims of the queries' own latent (q_a).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.errors import ConfigError
from blockferry.engine.models.blocks import FeedForward, GatedMlp, PreNormLayer, layer_norms, share
from blockferry.engine.models.config import rope_config, rope_kind, rope_scaling
from blockferry.engine.models.decoder import Build, Decoder
from blockferry.engine.models.layers import Linear, make_linear, rope_table
from blockferry.engine.models.moe import SparseMlp, SparseParts, read_float_router, read_routed_experts
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes
from blockferry.engine.models.routing import GroupLimits, sigmoid_grouped_top_k
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.step import Step
from blockferry.engine.models.weights import features_of
from blockferry.engine.models.yarn import sharpening, yarn_config, yarn_table

_THETA = 10000.0
_LATENT_NORM_EPS = 1e-6  # whatever the model's other norms have


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of latent attention, and which of this rank's heads it computes."""

    num_heads: int  # of all ranks
    heads: Span  # this rank's
    q_rank: int | None  # A; None: queries come straight from the hidden state
    latent_dim: int  # C
    nope_dim: int  # N
    rotated_dim: int  # W
    value_dim: int  # V
    is_interleaved: bool  # rotated dims are stored as pairs side by side
    has_bias: bool

    @property
    def query_dim(self) -> int:
        """Dims of a head's query."""
        return self.nope_dim + self.rotated_dim

    @property
    def entry_dim(self) -> int:
        """R."""
        return self.latent_dim + self.rotated_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentParts:
    """Weights of one layer of latent attention on one rank."""

    shape: LatentShape
    down: Linear  # E -> A, C and W, or E -> C and W
    q_norm_A: torch.Tensor | None
    latent_norm_C: torch.Tensor
    queries: Linear  # A or E -> N of every head, then W of every head
    keys_HNC: torch.Tensor  # W_UK
    values_HCV: torch.Tensor  # W_UV
    out: Linear


def build_deepseek_v3(build: Build) -> Decoder:
    """One rank's part of a DeepseekV3ForCausalLM. Raises ModelLoadError or ConfigError."""
    return Decoder(build, deepseek_layers(build, build.layer_numbers))


def deepseek_layers(build: Build, numbers: Sequence[int]) -> list[PreNormLayer]:
    """Layers model.layers.NUMBER. Raises as build_deepseek_v3."""
    _check(build)
    shape = latent_shape(build)
    cos_sin, scale = _cos_sin(build, shape.rotated_dim), attention_scale(build, shape)
    layers = []
    for number in numbers:
        parts = read_latent_attention(build, f"model.layers.{number}.self_attn.", shape)
        attention = LatentAttention(build, number, parts, build.rule(number, scale=scale), cos_sin=cos_sin)
        layers.append(PreNormLayer(build, attention, _feed_forward(build, number), norms=layer_norms(build, number)))
    return layers


def latent_shape(build: Build) -> LatentShape:
    """What config.json says, with the defaults of transformers. Raises ConfigError, ModelLoadError."""
    config = build.config
    num_heads = config.integer("num_attention_heads", default=128)
    return LatentShape(
        num_heads=num_heads,
        heads=share(num_heads, build, "query heads"),
        q_rank=config.find_integer("q_lora_rank"),
        latent_dim=config.integer("kv_lora_rank", default=512),
        nope_dim=config.integer("qk_nope_head_dim", default=128),
        rotated_dim=config.integer("qk_rope_head_dim", default=64),
        value_dim=config.integer("v_head_dim", default=128),
        is_interleaved=config.flag("rope_interleave", default=True),
        has_bias=config.flag("attention_bias", default=False),
    )


def read_latent_attention(build: Build, prefix: str, shape: LatentShape) -> LatentParts:
    """Read PREFIXq_a_proj and q_b_proj (or q_proj), kv_a_proj_with_mqa, kv_b_proj, o_proj. Raises ModelLoadError."""
    weights, hidden_size, q_rank = build.weights, build.header.hidden_size, shape.q_rank
    queries_FA = weights.matrix(
        f"{prefix}{'q_proj' if q_rank is None else 'q_b_proj'}.weight",
        (shape.num_heads * shape.query_dim, hidden_size if q_rank is None else q_rank),
        rows=[features_of(shape.heads, shape.query_dim)],
    )
    up_HFC = weights.matrix(
        f"{prefix}kv_b_proj.weight",
        (shape.num_heads * (shape.nope_dim + shape.value_dim), shape.latent_dim),
        rows=[features_of(shape.heads, shape.nope_dim + shape.value_dim)],
    ).view(len(shape.heads), -1, shape.latent_dim)
    return LatentParts(
        shape=shape,
        down=_read_down(build, prefix, shape),
        q_norm_A=None if q_rank is None else weights.norm(f"{prefix}q_a_layernorm.weight", q_rank),
        latent_norm_C=weights.norm(f"{prefix}kv_a_layernorm.weight", shape.latent_dim),
        queries=make_linear(queries_FA[_query_order(shape)]),
        keys_HNC=up_HFC[:, : shape.nope_dim].contiguous(),
        values_HCV=up_HFC[:, shape.nope_dim :].transpose(1, 2).contiguous(),
        out=weights.row_parallel(
            f"{prefix}o_proj",
            (hidden_size, shape.num_heads * shape.value_dim),
            features_of(shape.heads, shape.value_dim),
            has_bias=shape.has_bias,
        ),
    )


class LatentAttention:
    """The Mixer that the module draws. One thread calls it."""

    def __init__(
        self, build: Build, layer: int, parts: LatentParts, rule: AttentionRule, *, cos_sin: torch.Tensor
    ) -> None:
        """cos_sin is layers.rope_table's, of the rotated dims."""
        self._parts = parts
        self._layer = layer
        self._rule = rule
        self._cos_sin = cos_sin
        self._ops = build.ops
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer; without the small products of each head."""
        return [self._parts.down, self._parts.queries, self._parts.out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        parts, latent_dim = self._parts, self._parts.shape.latent_dim
        q_TF, latent_TR = self._project(x_TE)
        nope_THN, rotated_THW = self._split_heads(q_TF)
        self._ops.rotate(rotated_THW, latent_TR[:, latent_dim:].unsqueeze(1), self._cos_sin, step.positions_T)
        absorbed_HTC = nope_THN.transpose(0, 1) @ parts.keys_HNC
        q_THR = torch.cat((absorbed_HTC.transpose(0, 1), rotated_THW), dim=-1)
        attended_THC = step.caches.attend_latent(self._layer, q_THR, latent_TR, self._rule, value_dim=latent_dim)
        value_HTV = attended_THC.transpose(0, 1) @ parts.values_HCV
        return self._reduce(parts.out(value_HTV.transpose(0, 1).flatten(1)))

    def _project(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [T, H N + H W], latents [T, R]); neither is rotated."""
        parts, shape = self._parts, self._parts.shape
        down_TF = parts.down(x_TE)
        latent_TR = down_TF[:, shape.q_rank or 0 :]
        latent_TR[:, : shape.latent_dim] = self._norm(latent_TR[:, : shape.latent_dim], parts.latent_norm_C)
        if parts.q_norm_A is None:
            return parts.queries(x_TE), latent_TR
        return parts.queries(self._norm(down_TF[:, : shape.q_rank], parts.q_norm_A)), latent_TR

    def _norm(self, x_TF: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
        """The norm of x, which keeps its values, in memory of its own."""
        return self._ops.add_rms_norm(x_TF, None, weight_F, _LATENT_NORM_EPS)[0]

    def _split_heads(self, q_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, H, N], [T, H, W])."""
        shape = self._parts.shape
        num_nope = len(shape.heads) * shape.nope_dim
        per_head = (len(q_TF), len(shape.heads), -1)
        return q_TF[:, :num_nope].view(per_head), q_TF[:, num_nope:].view(per_head)


def _read_down(build: Build, prefix: str, shape: LatentShape) -> Linear:
    """q_a_proj, where there is one, and kv_a_proj_with_mqa as one layer."""
    projections = [("kv_a_proj_with_mqa", torch.cat((torch.arange(shape.latent_dim), _latent_rotation(shape))))]
    if shape.q_rank is not None:
        projections.insert(0, ("q_a_proj", torch.arange(shape.q_rank)))
    weights, hidden_size = build.weights, build.header.hidden_size
    matrices, biases = [], []
    for name, order in projections:
        matrices.append(weights.matrix(f"{prefix}{name}.weight", (len(order), hidden_size))[order])
        if shape.has_bias:
            biases.append(weights.vector(f"{prefix}{name}.bias", len(order))[order])
    return make_linear(torch.cat(matrices), torch.cat(biases) if biases else None)


def _query_order(shape: LatentShape) -> torch.Tensor:
    """Rows of the queries' projection: what is not rotated of every head, then what is."""
    first_H1 = torch.arange(len(shape.heads))[:, None] * shape.query_dim
    nope_HN = first_H1 + torch.arange(shape.nope_dim)
    rotated_HW = first_H1 + shape.nope_dim + _rotation(shape)
    return torch.cat((nope_HN.flatten(), rotated_HW.flatten()))


def _latent_rotation(shape: LatentShape) -> torch.Tensor:
    """Rows of the latents' projection that are rotated."""
    return shape.latent_dim + _rotation(shape)


def _rotation(shape: LatentShape) -> torch.Tensor:
    """int64 [W]: rotated dims in the order in which the first half pairs with the second."""
    dims = torch.arange(shape.rotated_dim)
    return torch.cat((dims[0::2], dims[1::2])) if shape.is_interleaved else dims


def attention_scale(build: Build, shape: LatentShape) -> float:
    """The scale of scores; where rope_parameters have mscale_all_dim, YaRN sharpens here what its table does not."""
    scale, scaling = float(shape.query_dim**-0.5), rope_scaling(build.header.values)
    weight, factor = scaling.find_number("mscale_all_dim"), scaling.find_number("factor", above=0.0)
    if rope_kind(scaling) == "default" or not weight:
        return scale
    if factor is None:
        raise ConfigError("config.json", "factor is missing beside mscale_all_dim")
    return scale * sharpening(factor, weight) ** 2


def _cos_sin(build: Build, rotated_dim: int) -> torch.Tensor:
    values, header, placement = build.header.values, build.header, build.weights.placement
    scaling = rope_scaling(values)
    if rope_kind(scaling) == "yarn":
        theta = build.config.number("rope_theta", default=_THETA, above=1.0)
        yarn = yarn_config(scaling, theta=theta, max_positions=header.max_positions)
        table = yarn_table(yarn, head_dim=rotated_dim, max_len=placement.max_model_len)
    else:
        rope = rope_config(values, header.max_positions)
        table = rope_table(rope, head_dim=rotated_dim, max_len=placement.max_model_len)
    return table.to(placement.device)


def _feed_forward(build: Build, layer: int) -> FeedForward:
    config, prefix = build.config, f"model.layers.{layer}.mlp."
    if layer < config.count("first_k_dense_replace", default=3):
        return GatedMlp(build, prefix, config.integer("intermediate_size", default=18432))
    shapes = ExpertShapes(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=256),
        hidden_size=build.header.hidden_size,
        feed_forward_size=config.integer("moe_intermediate_size", default=2048),
    )
    bias_X = build.weights.float_vector(f"{prefix}gate.e_score_correction_bias", shapes.num_experts)
    num_shared = config.count("n_shared_experts", default=1)
    shared_size = shapes.feed_forward_size * num_shared
    parts = SparseParts(
        router=read_float_router(build, f"{prefix}gate", (shapes.num_experts, shapes.hidden_size)),
        route=functools.partial(sigmoid_grouped_top_k, bias_X=bias_X, limits=_limits(build, shapes.num_experts)),
        experts=read_routed_experts(build, ExpertNames(prefix=f"{prefix}experts"), shapes),
        shared=GatedMlp(build, f"{prefix}shared_experts.", shared_size) if num_shared else None,
    )
    return SparseMlp(build, parts)


def _limits(build: Build, num_experts: int) -> GroupLimits:
    config = build.config
    limits = GroupLimits(
        num_groups=config.integer("n_group", default=8),
        num_chosen_groups=config.integer("topk_group", default=4),
        num_chosen=config.integer("num_experts_per_tok", default=8),
        scale=config.number("routed_scaling_factor", default=2.5),
        is_normalised=config.flag("norm_topk_prob", default=True),
    )
    if num_experts % limits.num_groups or num_experts < 2 * limits.num_groups:
        raise ConfigError(
            "config.json",
            f"n_routed_experts={num_experts} do not form n_group={limits.num_groups} equal groups of at least 2",
        )
    if limits.num_chosen_groups > limits.num_groups:
        raise ConfigError("config.json", f"topk_group={limits.num_chosen_groups} exceeds n_group={limits.num_groups}")
    num_in_reach = num_experts // limits.num_groups * limits.num_chosen_groups
    if limits.num_chosen > num_in_reach:
        raise ConfigError(
            "config.json",
            f"num_experts_per_tok={limits.num_chosen} exceeds the {num_in_reach} experts of "
            f"topk_group={limits.num_chosen_groups} groups",
        )
    return limits


def _check(build: Build) -> None:
    """Raises ConfigError for what would be computed wrongly."""
    values = build.header.values
    for name, computed in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)):
        if values.get(name, computed) != computed:
            raise ConfigError("config.json", f"{name}={values[name]} is not supported; supported: {computed}")
