"""The Llama family as one decoder with options: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 dense.

Owns the weights of one rank: its pipeline stage's layers, and of each its tensor-parallel shard. Attention and
pages belong to the caller (`Attend`).

    x ----------------+-- norm -- qkv -- (q/k norm) -- rotate -- attend -- out --(+)-- norm -- gate,up -- silu*
                      |                                                          |       ... -- down --(+)-- x'
                      +---------------- residual ---------------------------------+

Legend: T tokens, S tokens that want logits, E hidden, F feed-forward shard, H query heads, K KV heads,
D head dim, C = (H + 2 K) D, V vocabulary shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from blockferry.engine.models.config import DecoderConfig
from blockferry.engine.models.layers import Communicator, Linear, VocabEmbedding, make_linear, rope_table
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.sharding import (
    HeadSplit,
    RankPlace,
    Span,
    split_evenly,
    split_heads,
    split_layers,
    split_padded,
)

_EMBEDDING = "model.embed_tokens.weight"
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(local layer, q [T, H, D], k [T, K, D], v [T, K, D]) -> [T, H, D]; writes k and v into the pages."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """What one rank holds of the model."""

    layers: Span
    heads: HeadSplit
    feed_forward: Span
    vocab: Span
    vocab_stride: int  # vocabulary rows per rank, padding included
    is_first_stage: bool
    is_last_stage: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and as what the weights live."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer; fused where the input is shared."""

    attention_norm_E: torch.Tensor
    qkv: Linear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    out: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


def shard_of(config: DecoderConfig, place: RankPlace) -> ModelShard:
    """The part of one rank. Raises ValueError where the model cannot be shared that way."""
    tp_rank, tp_size = place.tp_rank, place.tp_size
    return ModelShard(
        layers=split_layers(config.num_layers, place.pp_rank, place.pp_size),
        heads=split_heads(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, tp_rank=tp_rank, tp_size=tp_size
        ),
        feed_forward=split_evenly(config.intermediate_size, tp_rank, tp_size),
        vocab=split_padded(config.vocab_size, tp_rank, tp_size),
        vocab_stride=-(-config.vocab_size // tp_size),
        is_first_stage=place.pp_rank == 0,
        is_last_stage=place.pp_rank == place.pp_size - 1,
    )


class LlamaModel:
    """One rank's part of a decoder. One thread calls it."""

    def __init__(
        self,
        config: DecoderConfig,
        shard: ModelShard,
        *,
        checkpoint: Checkpoint,
        placement: Placement,
        ops: LayerOps,
        communicator: Communicator,
    ) -> None:
        """Reads the shard's weights. Raises ModelLoadError."""
        self.config = config
        self.shard = shard
        self._ops = ops
        self._communicator = communicator
        weights = _WeightReader(config, shard, checkpoint, placement, communicator.rank == 0)
        self._embedding: VocabEmbedding | None = None
        self._norm_E: torch.Tensor | None = None
        self._head: Linear | None = None
        embedding_VE: torch.Tensor | None = None
        if shard.is_first_stage:
            embedding_VE = weights.vocab(_EMBEDDING)
            self._embedding = VocabEmbedding(embedding_VE, shard.vocab, communicator)
        indices = range(shard.layers.start, shard.layers.stop)
        self.layers: Sequence[DecoderLayer] = [weights.layer(index) for index in indices]
        if shard.is_last_stage:
            self._norm_E = weights.vector("model.norm.weight", config.hidden_size)
            if not config.has_tied_embeddings:
                embedding_VE = weights.vocab("lm_head.weight")
            self._head = make_linear(weights.vocab(_EMBEDDING) if embedding_VE is None else embedding_VE)
        self.cos_sin = rope_table(config.rope, head_dim=config.head_dim, max_len=placement.max_model_len)
        self.cos_sin = self.cos_sin.to(placement.device)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, E] of token ids; first stage only."""
        assert self._embedding is not None, "embed() is for the first stage"
        return self._embedding(token_ids_T)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run this stage's layers. Returns [T, E], the input of the next stage or of logits()."""
        config, heads, ops, reduce = self.config, self.shard.heads, self._ops, self._communicator.all_reduce
        eps, cos_sin = config.rms_norm_eps, self.cos_sin
        sizes = [len(heads.query), len(heads.kv), len(heads.kv)]
        qkv_shape = (len(x_TE), sum(sizes), config.head_dim)
        residual_TE: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, layer.attention_norm_E, eps)
            q_THD, k_TKD, v_TKD = layer.qkv(x_TE).view(qkv_shape).split_with_sizes(sizes, 1)
            if layer.q_norm_D is not None and layer.k_norm_D is not None:
                q_THD = ops.rms_norm_heads(q_THD, layer.q_norm_D, eps)
                k_TKD = ops.rms_norm_heads(k_TKD, layer.k_norm_D, eps)
            ops.rotate(q_THD, k_TKD, cos_sin, positions_T)
            x_TE = reduce(layer.out(attend(index, q_THD, k_TKD, v_TKD).flatten(1)))
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, layer.mlp_norm_E, eps)
            x_TE = reduce(layer.down(ops.silu_and_mul(layer.gate_up(x_TE))))
        return x_TE if residual_TE is None else residual_TE + x_TE

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """Logits [S, vocab_size] on rank 0 of the last stage, None on its other ranks, which must call it too."""
        assert self._norm_E is not None, "logits() is for the last stage"
        assert self._head is not None, "logits() is for the last stage"
        normed_SE, _ = self._ops.add_rms_norm(hidden_SE, None, self._norm_E, self.config.rms_norm_eps)
        logits_SV = self._communicator.gather_columns(self._head(normed_SE))
        return None if logits_SV is None else logits_SV[:, : self.config.vocab_size]

    @property
    def layer_linears(self) -> Sequence[Linear]:
        """Linear layers that every token passes, in order."""
        return [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]

    @property
    def head(self) -> Linear | None:
        """The language-model head; last stage only."""
        return self._head


class _WeightReader:
    """Assembles one rank's fused weights from the checkpoint's tensors."""

    def __init__(
        self, config: DecoderConfig, shard: ModelShard, checkpoint: Checkpoint, placement: Placement, has_bias: bool
    ) -> None:
        self._config = config
        self._shard = shard
        self._checkpoint = checkpoint
        self._placement = placement
        self._adds_row_bias = has_bias  # the bias of a row-parallel layer enters the sum once

    def layer(self, layer: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        heads, head_dim = self._shard.heads, config.head_dim
        query, kv = _columns_of(heads.query, head_dim), _columns_of(heads.kv, head_dim)
        num_q, num_kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        ff, num_ff = self._shard.feed_forward, config.intermediate_size
        return DecoderLayer(
            attention_norm_E=self.vector(f"{prefix}input_layernorm.weight", config.hidden_size),
            qkv=self._column_parallel(
                [
                    (f"{attention}q_proj", num_q, query),
                    (f"{attention}k_proj", num_kv, kv),
                    (f"{attention}v_proj", num_kv, kv),
                ],
                has_bias=config.has_qkv_bias,
            ),
            q_norm_D=self.vector(f"{attention}q_norm.weight", head_dim) if config.has_qk_norm else None,
            k_norm_D=self.vector(f"{attention}k_norm.weight", head_dim) if config.has_qk_norm else None,
            out=self._row_parallel(f"{attention}o_proj", num_q, query, has_bias=config.has_out_bias),
            mlp_norm_E=self.vector(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._column_parallel(
                [(f"{mlp}gate_proj", num_ff, ff), (f"{mlp}up_proj", num_ff, ff)], has_bias=config.has_mlp_bias
            ),
            down=self._row_parallel(f"{mlp}down_proj", num_ff, ff, has_bias=config.has_mlp_bias),
        )

    def vector(self, name: str, size: int) -> torch.Tensor:
        out = self._empty(size)
        self._checkpoint.read_into(out, name, (size,))
        return out

    def vocab(self, name: str) -> torch.Tensor:
        """This rank's vocabulary rows [vocab_stride, E]; padding rows are zero."""
        out = self._empty(self._shard.vocab_stride, self._config.hidden_size)
        shape = (self._config.vocab_size, self._config.hidden_size)
        self._checkpoint.read_into(out, name, shape, rows=self._shard.vocab)
        out[len(self._shard.vocab) :].zero_()
        return out

    def _column_parallel(self, parts: list[tuple[str, int, Span]], *, has_bias: bool) -> Linear:
        """One layer of several projections of one input: (name, all output features, this rank's)."""
        num_features, hidden_size = sum(len(span) for _, _, span in parts), self._config.hidden_size
        weight_FE = self._empty(num_features, hidden_size)
        bias_F = self._empty(num_features) if has_bias else None
        start = 0
        for name, size, span in parts:
            self._checkpoint.read_into(weight_FE[start:], f"{name}.weight", (size, hidden_size), rows=span)
            if bias_F is not None:
                self._checkpoint.read_into(bias_F[start:], f"{name}.bias", (size,), rows=span)
            start += len(span)
        return make_linear(weight_FE, bias_F)

    def _row_parallel(self, name: str, size: int, span: Span, *, has_bias: bool) -> Linear:
        """A layer whose input features are shared; the ranks' outputs are summed."""
        hidden_size = self._config.hidden_size
        weight_FE = self._empty(hidden_size, len(span))
        self._checkpoint.read_into(weight_FE, f"{name}.weight", (hidden_size, size), columns=span)
        bias_F = self.vector(f"{name}.bias", hidden_size) if has_bias and self._adds_row_bias else None
        return make_linear(weight_FE, bias_F)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)


def _columns_of(heads: Span, head_dim: int) -> Span:
    return Span(start=heads.start * head_dim, stop=heads.stop * head_dim)
