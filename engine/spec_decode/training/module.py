"""The draft module in plain torch, unrolled over its own output, with gradients. float32 weights, bfloat16 products.

    x_i = eh_proj [enorm(E(t_i+1)); hnorm(h_i)]      one decoder layer      o_i -- shared_head.norm -- head --> t_i+2
    step 2:  the same with E(t_i+2) and h_i := o_i, one position later, predicts t_i+3; and so on

DeepSeek-V3 (arXiv 2412.19437 section 2.2); unrolled as EAGLE-2's successors train (HASS, arXiv 2408.15766): in step s a
token attends to what step 1 made of the tokens before it, and to what steps 2..s made on its own way, as it will when
it drafts. Tokens are those of the text: a draft after one that was not accepted counts for nothing.

Legend: B sequences, T tokens of each, E hidden, H query heads, K KV heads, D head dim, S steps, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from blockferry.engine.spec_decode.training.base import BaseModel
from blockferry.engine.spec_decode.training.head_folder import HEAD_NAMES
from blockferry.engine.spec_decode.training.norm import rms_norm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of the base's shape the layer needs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    @classmethod
    def of(cls, base: BaseModel) -> Shape:
        """Of the model's own layers."""
        config = base.config
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=base.header.norm_eps,
        )


class DraftModule(nn.Module):
    """Its parameters are named as in HEAD_NAMES, with underscores for dots."""

    def __init__(self, shape: Shape, weights: Mapping[str, torch.Tensor], cos_sin: torch.Tensor) -> None:
        """cos_sin: float32 [positions, D], see rope_table()."""
        super().__init__()
        self._shape = shape
        cos, sin = cos_sin.chunk(2, dim=-1)
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        for name in HEAD_NAMES:
            self.register_parameter(_attribute(name), nn.Parameter(weights[name].detach().float().clone()))

    def weights(self) -> dict[str, torch.Tensor]:
        """By HEAD_NAMES, not copied."""
        return {name: self.get_parameter(_attribute(name)).detach() for name in HEAD_NAMES}

    def forward(self, embedded_SBTE: torch.Tensor, hidden_BTE: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """What goes into the shared head at every step: [S, B, T, E] in the inputs' dtype.

        hidden[b, t] is that of position first[b] + t, embedded[s, b, t] belongs to the token s + 1 positions later.
        """
        weights = _Weights(self, hidden_BTE.dtype)
        positions_BT = first_B[:, None] + torch.arange(hidden_BTE.shape[1])
        keys, values, outputs = [], [], []
        for step, embedded_BTE in enumerate(embedded_SBTE):
            x_BTE = self._combine(weights, embedded_BTE, hidden_BTE)
            q, k, v = self._heads(weights, weights.norm("input_layernorm.weight", x_BTE), positions_BT + step)
            keys.append(k)
            values.append(v)
            attended = _attend_first(q, k, v) if step == 0 else _attend_later(q, keys, values)
            x_BTE = x_BTE + weights.linear("self_attn.o_proj.weight", attended)
            hidden_BTE = x_BTE + _feed_forward(weights, weights.norm("post_attention_layernorm.weight", x_BTE))
            outputs.append(weights.norm("shared_head.norm.weight", hidden_BTE))
        return torch.stack(outputs)

    def _heads(
        self, weights: _Weights, x_BTE: torch.Tensor, positions_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, all [B, H, T, D]: KV heads repeated for their queries."""
        shape = self._shape
        cos, sin = (table[positions_BT][:, None].to(x_BTE.dtype) for table in (self._cos, self._sin))
        q, k, v = (_split(weights.linear(f"self_attn.{name}_proj.weight", x_BTE), shape.head_dim) for name in "qkv")
        copies = shape.num_heads // shape.num_kv_heads
        return _rotate(q, cos, sin), _repeat(_rotate(k, cos, sin), copies), _repeat(v, copies)

    def _combine(self, weights: _Weights, embedded_BTE: torch.Tensor, hidden_BTE: torch.Tensor) -> torch.Tensor:
        parts = (weights.norm("enorm.weight", embedded_BTE), weights.norm("hnorm.weight", hidden_BTE))
        return weights.linear("eh_proj.weight", torch.cat(parts, dim=-1))

    @property
    def norm_eps(self) -> float:
        """Of all norms."""
        return self._shape.norm_eps


class _Weights:
    """A module's weights in the dtype of one pass, cast once for all of its steps."""

    def __init__(self, module: DraftModule, dtype: torch.dtype) -> None:
        self._cast = {name: module.get_parameter(_attribute(name)).to(dtype) for name in HEAD_NAMES}
        self._eps = module.norm_eps

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._cast[name])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._cast[name], self._eps)


def _feed_forward(weights: _Weights, x_BTE: torch.Tensor) -> torch.Tensor:
    gate, up = weights.linear("mlp.gate_proj.weight", x_BTE), weights.linear("mlp.up_proj.weight", x_BTE)
    return weights.linear("mlp.down_proj.weight", functional.silu(gate) * up)


def _attribute(name: str) -> str:
    return name.replace(".", "_")


def _split(x_BTF: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, H, T, D]: features as heads."""
    return x_BTF.view(*x_BTF.shape[:2], -1, head_dim).transpose(1, 2)


def _rotate(x_BHTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves of a head against each other."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


def _repeat(x_BKTD: torch.Tensor, copies: int) -> torch.Tensor:
    return x_BKTD.repeat_interleave(copies, dim=1)


def _attend_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, T, H * D]: every token sees itself and those before it."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _attend_later(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """[B, T, H * D]: step 1's keys of the tokens up to here, and those of later steps on this token's own way."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    num_tokens = q.shape[2]
    unseen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    scores = ((q * scale) @ keys[0].transpose(-1, -2)).masked_fill(unseen, -torch.inf)
    own = [(q * scale * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
    out = weights[..., :num_tokens] @ values[0]
    for place, v in enumerate(values[1:]):
        out = out + weights[..., num_tokens + place : num_tokens + place + 1] * v
    return out.transpose(1, 2).flatten(2)
