"""A decoder: embedding, layers one after the other, last norm, head. What a layer is, its family's file says.

Owns one rank's ends of the model (embedding, norm, head) and holds its stage's layers. A family is a function
Build -> Decoder, listed in registry.py.

    token ids -- embedding -- layer -- layer -- ... -- norm -- head -- logits
                      x, residual ->  x, residual         a layer's output is x + residual, added by whoever needs it

Legend: T tokens, N tokens of an encoder's input, S tokens that want logits, E hidden, V vocabulary shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.reach import ChunkReach, Reach, WindowReach
from blockferry.engine.models.config import ModelHeader
from blockferry.engine.models.layers import Communicator, Linear, VocabEmbedding, make_linear
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.sharding import RankPlace, Span, split_layers, split_padded
from blockferry.engine.models.state_ops import StateOps
from blockferry.engine.models.step import Caches, Step
from blockferry.engine.models.tape_source import TapeSource
from blockferry.engine.models.weights import WeightReader


class Layer(Protocol):
    """One decoder layer on one rank."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Linear layers that every token passes, in order."""

    def forward(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (x, residual): the layer's output is x (+ residual), and so is its input. May overwrite both."""


class Encoder(Protocol):
    """What of an encoder-decoder comes before the decoder, on one rank."""

    def encode(self, x_NE: torch.Tensor, caches: Caches) -> None:
        """Encode one input, given as its tokens' embeddings, and write what this stage's cross attention reads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageShard:
    """What one rank holds of the model's ends, and its stage's layers."""

    layers: Span
    vocab: Span
    vocab_stride: int  # vocabulary rows per rank, padding included
    is_first_stage: bool
    is_last_stage: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Everything a family makes its layers from."""

    header: ModelHeader
    config: ModelConfig  # the checkpoint's config.json, typed reading
    place: RankPlace
    shard: StageShard
    weights: WeightReader
    ops: LayerOps
    state_ops: StateOps
    communicator: Communicator
    reaches: Mapping[int, Reach]  # of each layer that attends, by its number

    @property
    def layer_numbers(self) -> range:
        """Layers of this stage."""
        return range(self.shard.layers.start, self.shard.layers.stop)

    def rule(self, layer: int, *, scale: float) -> AttentionRule:
        """How a layer attends, as far as its reach says."""
        match self.reaches[layer]:
            case WindowReach() as reach:
                return AttentionRule(scale=scale, window=reach.window)
            case ChunkReach() as reach:
                return AttentionRule(scale=scale, chunk=reach.chunk)
            case _:
                return AttentionRule(scale=scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How the ends of a model differ between families."""

    embedding_name: str = "model.embed_tokens.weight"
    norm_name: str | None = "model.norm.weight"  # None: the last layer's output is normed already
    head_name: str = "lm_head.weight"
    embedding_scale: float | None = None
    norm_offset: float = 0.0  # 1 for norm weights that are stored relative to one
    logit_scale: float | None = None
    logit_soft_cap: float | None = None  # logits = cap * tanh(logits / cap)
    logit_bias_name: str | None = None  # of a tensor [1, V], where the checkpoint has it

    def head_name_of(self, header: ModelHeader) -> str:
        """The tensor that is the head, which may be the embedding's."""
        return self.embedding_name if header.has_tied_embeddings else self.head_name


class Decoder:
    """One rank's part of a decoder. One thread calls it."""

    def __init__(
        self,
        build: Build,
        layers: Sequence[Layer],
        *,
        ends: Ends | None = None,
        tape_source: TapeSource | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """Reads the ends' weights. Raises ModelLoadError."""
        ends = ends or Ends()
        self.header = build.header
        self.shard = build.shard
        self.layers = layers
        self.tape_source = tape_source
        self.ends = ends
        self._encoder = encoder
        self._ops = build.ops
        self._communicator = build.communicator
        self._embedding: VocabEmbedding | None = None
        self._norm_E: torch.Tensor | None = None
        self._logit_bias_1V: torch.Tensor | None = None
        self._head: Linear | None = None
        header, shard, weights = build.header, build.shard, build.weights
        embedding_VE: torch.Tensor | None = None
        if shard.is_first_stage or encoder is not None:
            embedding_VE = read_vocab(build, ends.embedding_name)
            self._embedding = VocabEmbedding(embedding_VE, shard.vocab, build.communicator)
        if shard.is_last_stage:
            if ends.norm_name is not None:
                self._norm_E = weights.norm(ends.norm_name, header.hidden_size, offset=ends.norm_offset)
            if ends.logit_bias_name is not None and ends.logit_bias_name in weights.checkpoint:
                self._logit_bias_1V = weights.matrix(ends.logit_bias_name, (1, header.vocab_size))
            is_shared = header.has_tied_embeddings and embedding_VE is not None
            name = ends.head_name_of(header)
            self._head = make_linear(
                embedding_VE if is_shared and embedding_VE is not None else read_vocab(build, name)
            )

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, E] of token ids; first stage only, or every one where there is an encoder."""
        assert self._embedding is not None, "embed() is for the first stage"
        x_TE = self._embedding(token_ids_T)
        if self.ends.embedding_scale is not None:
            x_TE = x_TE * self.ends.embedding_scale
        return x_TE

    def encode(self, token_ids_N: torch.Tensor, caches: Caches) -> None:
        """Encode one row's input for this stage's cross attention; of models with an encoder."""
        assert self._encoder is not None, f"{self.header.architecture} has no encoder"
        self._encoder.encode(self.embed(token_ids_N), caches)

    def forward(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """Run this stage's layers. Returns [T, E], the input of the next stage or of logits()."""
        residual_TE: torch.Tensor | None = None
        for number, layer in enumerate(self.layers, start=self.shard.layers.start):
            x_TE, residual_TE = layer.forward(x_TE, residual_TE, step)
            step.layer_done(number)
        return x_TE if residual_TE is None else residual_TE + x_TE

    def normed(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """What the head reads of forward()'s hidden states, which keep their values; last stage only."""
        if self._norm_E is None:
            return hidden_SE
        return self._ops.add_rms_norm(hidden_SE, None, self._norm_E, self.header.norm_eps)[0]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """Logits [S, vocab_size] on rank 0 of the last stage, None on its other ranks, which must call it too."""
        assert self._head is not None, "logits() is for the last stage"
        logits_SV = self._communicator.gather_columns(self._head(self.normed(hidden_SE)))
        if logits_SV is None:
            return None
        logits_SV = logits_SV[:, : self.header.vocab_size]
        if self._logit_bias_1V is not None:
            logits_SV = logits_SV + self._logit_bias_1V
        if self.ends.logit_scale is not None:
            logits_SV = logits_SV * self.ends.logit_scale
        if self.ends.logit_soft_cap is not None:
            logits_SV = self.ends.logit_soft_cap * torch.tanh(logits_SV / self.ends.logit_soft_cap)
        return logits_SV

    @property
    def layer_linears(self) -> Sequence[Linear]:
        """Linear layers that every token passes, in order."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def head(self) -> Linear | None:
        """The language-model head; last stage only."""
        return self._head


def stage_shard(header: ModelHeader, place: RankPlace) -> StageShard:
    """The part of one rank. Raises ConfigError where there are more stages than layers."""
    try:
        layers = split_layers(header.num_layers, place.pp_rank, place.pp_size)
    except ValueError as error:
        raise ConfigError("pp", str(error)) from None
    return StageShard(
        layers=layers,
        vocab=split_padded(header.vocab_size, place.tp_rank, place.tp_size),
        vocab_stride=-(-header.vocab_size // place.tp_size),
        is_first_stage=place.pp_rank == 0,
        is_last_stage=place.pp_rank == place.pp_size - 1,
    )


def read_vocab(build: Build, name: str) -> torch.Tensor:
    """This rank's vocabulary rows of an embedding or a head, padded to vocab_stride. Raises ModelLoadError."""
    shape = (build.header.vocab_size, build.header.hidden_size)
    return build.weights.vocab(name, shape, build.shard.vocab, build.shard.vocab_stride)
