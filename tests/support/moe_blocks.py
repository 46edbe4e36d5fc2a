"""Layers of tiny random transformers models with experts: the oracle, its checkpoint, and our layer for one rank.

Legend: T tokens, X experts, E hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.config import read_header
from blockferry.engine.models.decoder import Build, stage_shard
from blockferry.engine.models.layers import DenseLinear, Linear
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.moe import (
    Activation,
    ClampedSwiglu,
    GatedSharedExpert,
    SharedExpert,
    SparseMlp,
    SparseParts,
    Weighting,
    read_routed_experts,
)
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes, StackedLayout
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.routing import (
    GroupLimits,
    Route,
    sigmoid_grouped_top_k,
    softmax_top_k,
    softmax_top_k_normalised,
    top_k_sigmoid,
    top_k_softmax,
)
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement, WeightReader
from blockferry.engine.worker.parallel import LoneCommunicator

HIDDEN_SIZE, FEED_FORWARD_SIZE, NUM_EXPERTS, NUM_CHOSEN = 32, 20, 8, 3
SEVERAL_CHOSEN = {"num_experts_per_tok": NUM_CHOSEN}
QWEN = SEVERAL_CHOSEN | {"num_experts": NUM_EXPERTS, "moe_intermediate_size": FEED_FORWARD_SIZE}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {
    "moe_intermediate_size": FEED_FORWARD_SIZE,
    "n_routed_experts": NUM_EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
JAMBA = {
    "num_experts": NUM_EXPERTS,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
LIMITS = GroupLimits(num_groups=4, num_chosen_groups=2, num_chosen=NUM_CHOSEN, scale=2.5, is_normalised=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeFamily:
    """How one family's layer is made in transformers and here."""

    config: type[transformers.PreTrainedConfig]
    options: dict[str, Any]
    block: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    stacked: StackedLayout = StackedLayout.ROWS
    has_bias: bool = False
    activation: Activation = TorchOps().silu_and_mul
    weighting: Weighting = Weighting.OUTPUT
    route: Callable[..., Any] = softmax_top_k_normalised
    num_chosen: int = NUM_CHOSEN


FAMILIES = {
    "qwen3_moe": MoeFamily(config=transformers.Qwen3MoeConfig, options=QWEN | {"norm_topk_prob": True}),
    "qwen3_moe_plain": MoeFamily(
        config=transformers.Qwen3MoeConfig, options=QWEN | {"norm_topk_prob": False}, route=softmax_top_k
    ),
    "qwen3_next": MoeFamily(
        config=transformers.Qwen3NextConfig,
        options=QWEN | LINEAR_ATTENTION | {"shared_expert_intermediate_size": 12},
        shared="shared_expert",
    ),
    "qwen3_5_moe": MoeFamily(
        config=transformers.Qwen3_5MoeTextConfig,
        options=QWEN | LINEAR_ATTENTION | {"shared_expert_intermediate_size": 12},
        shared="shared_expert",
    ),
    "gpt_oss": MoeFamily(
        config=transformers.GptOssConfig,
        options=SEVERAL_CHOSEN | {"num_local_experts": NUM_EXPERTS},
        router="router",
        stacked=StackedLayout.ALTERNATING_COLUMNS,
        has_bias=True,
        activation=ClampedSwiglu(),
        route=top_k_softmax,
    ),
    "llama4": MoeFamily(
        config=transformers.Llama4TextConfig,
        options={"num_local_experts": NUM_EXPERTS, "intermediate_size_mlp": 28},
        block="feed_forward",
        router="router",
        shared="shared_expert",
        stacked=StackedLayout.COLUMNS,
        weighting=Weighting.INPUT,
        route=top_k_sigmoid,
        num_chosen=1,
    ),
    "deepseek_v3": MoeFamily(
        config=transformers.DeepseekV3Config,
        options=SEVERAL_CHOSEN | DEEPSEEK | LATENT_ATTENTION,
        shared="shared_experts",
        route=functools.partial(sigmoid_grouped_top_k, limits=LIMITS),
    ),
    "jamba": MoeFamily(
        config=transformers.JambaConfig,
        options=SEVERAL_CHOSEN | JAMBA,
        block="feed_forward",
        router="router",
        route=softmax_top_k,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeCase:
    """A saved model and its last layer's block with experts."""

    family: MoeFamily
    folder: Path
    block: torch.nn.Module
    prefix: str

    @torch.inference_mode()
    def reference(self, x_TE: torch.Tensor) -> torch.Tensor:
        """What transformers computes, [T, E]."""
        answer = self.block(x_TE[None])
        return (answer[0] if isinstance(answer, tuple) else answer).reshape(x_TE.shape)

    def partial(self, x_TE: torch.Tensor, place: RankPlace | None = None) -> torch.Tensor:
        """What one rank adds, [T, E]."""
        return self.layer(place).partial(x_TE)

    def layer(self, place: RankPlace | None = None) -> SparseMlp:
        """Our layer for one rank; only rank 0 adds the shared expert, which this does not shard."""
        place, family = place or RankPlace(), self.family
        parameters = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        router = parameters[f"{family.router}.weight"].detach()
        bias = parameters[f"{family.router}.bias"].detach() if family.has_bias else None
        build = make_build(self.folder, place)
        shapes = ExpertShapes(
            num_experts=NUM_EXPERTS,
            hidden_size=HIDDEN_SIZE,
            feed_forward_size=FEED_FORWARD_SIZE,
            has_bias=family.has_bias,
        )
        names = ExpertNames(prefix=f"{self.prefix}.experts", stacked=family.stacked)
        parts = SparseParts(
            router=DenseLinear(router, bias),
            route=self.route(parameters),
            experts=read_routed_experts(build, names, shapes, activation=family.activation, weighting=family.weighting),
            shared=self._shared(parameters) if place.tp_rank == 0 else None,
        )
        build.weights.checkpoint.close()
        return SparseMlp(build, parts)

    def route(self, parameters: dict[str, torch.Tensor]) -> Route:
        """The family's router function with its options."""
        correction = parameters.get("gate.e_score_correction_bias")
        if correction is not None:
            return functools.partial(self.family.route, bias_X=correction)
        return functools.partial(self.family.route, num_chosen=self.family.num_chosen)

    def _shared(self, parameters: dict[str, torch.Tensor]) -> SharedExpert | None:
        if self.family.shared is None:
            return None
        expert = ReferenceExpert(self.block.get_submodule(self.family.shared))
        gate = parameters.get("shared_expert_gate.weight")
        return expert if gate is None else GatedSharedExpert(expert, DenseLinear(gate.detach(), None))


class ReferenceExpert:
    """transformers' own shared expert."""

    linears: tuple[Linear, ...] = ()

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @torch.inference_mode()
    def partial(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See SharedExpert."""
        y_TE: torch.Tensor = self._module(x_TE)
        return y_TE


def make_build(folder: Path, place: RankPlace) -> Build:
    """What a layer is built from, for one rank that sums up by itself."""
    header = read_header(folder)
    return Build(
        header=header,
        config=ModelConfig(header.values),
        place=place,
        shard=stage_shard(header, place),
        weights=WeightReader(Checkpoint(folder), float32_placement(), adds_row_bias=place.tp_rank == 0),
        ops=TorchOps(),
        state_ops=TorchStateOps(),
        communicator=LoneCommunicator(),
        reaches={},
    )


def float32_placement() -> Placement:
    """Where the tests keep weights."""
    return Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


def make_case(folder: Path, name: str) -> MoeCase:
    """Write a tiny model of a family and find its block with experts; the same weights every time."""
    family = FAMILIES[name]
    common = {"vocab_size": 64, "hidden_size": HIDDEN_SIZE, "intermediate_size": FEED_FORWARD_SIZE}
    common |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(family.config(**(common | family.options))).eval()
    block = model.model.layers[1].get_submodule(family.block)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return MoeCase(family=family, folder=folder, block=block, prefix=f"model.layers.1.{family.block}")
