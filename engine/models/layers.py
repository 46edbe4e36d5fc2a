"""Building blocks of decoder models: linear layers with a kernel chosen once, vocabulary shards, rotary tables.

Weights are owned by the object built from them; nothing here reads files. Collectives go through Communicator.

Legend: T tokens, S tokens that want logits, E in features, F out features, V vocabulary, D head dim.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn import functional

from blockferry.engine.models.config import RopeConfig
from blockferry.engine.models.sharding import Span


class Communicator(Protocol):
    """The tensor-parallel ranks of one pipeline stage. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank among the stage's."""

    @property
    def size(self) -> int:
        """Ranks of the stage."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over the ranks; x may be overwritten."""

    def gather_columns(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """The ranks' equally wide parts side by side on rank 0, None elsewhere."""


class Linear(Protocol):
    """y = x W^T + b with the weight held in whatever form is fastest."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Returns [T, F]; x is contiguous."""


class DenseLinear:
    """torch's own linear layer."""

    def __init__(self, weight_FE: torch.Tensor, bias_F: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_FE.shape
        self.dtype, self.device = weight_FE.dtype, weight_FE.device
        self._weight_FE = weight_FE
        self._bias_F = bias_F

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return functional.linear(x_TE, self._weight_FE, self._bias_F)


class PackedLinear:
    """oneDNN's linear layer with the weight reordered once into the blocks that its CPU kernels read.

    Without it oneDNN reorders at every call: a third slower on SmolLM2 at any number of rows.
    """

    def __init__(self, weight_FE: torch.Tensor, bias_F: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_FE.shape
        self.dtype, self.device = weight_FE.dtype, weight_FE.device
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_FE)
        self._bias_F = bias_F
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        y_TF: torch.Tensor = self._linear(x_TE, self._packed, self._bias_F, "none", [], "")
        return y_TF


def make_linear(weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None) -> Linear:
    """The fastest exact linear layer for the weight's device and dtype."""
    if weight_FE.device.type == "cpu" and weight_FE.dtype is torch.bfloat16:
        from blockferry.engine.models.cpu_linear import CpuLinear, can_tile  # loads numba, which GPU workers never need

        if can_tile(weight_FE):
            return CpuLinear(weight_FE, bias_F)
    if weight_FE.device.type == "cpu" and _can_pack(weight_FE.dtype):
        return PackedLinear(weight_FE, bias_F)
    return DenseLinear(weight_FE, bias_F)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class VocabEmbedding:
    """Token embeddings, sharded by vocabulary rows; tokens of other shards contribute zeros to the sum."""

    def __init__(self, weight_VE: torch.Tensor, vocab: Span, communicator: Communicator) -> None:
        self._weight_VE = weight_VE
        self._vocab = vocab
        self._communicator = communicator

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Returns [T, E]."""
        if self._communicator.size == 1:
            return functional.embedding(token_ids_T, self._weight_VE)
        local_T = token_ids_T - self._vocab.start
        is_foreign_T = (local_T < 0) | (local_T >= len(self._vocab))
        x_TE = functional.embedding(local_T.masked_fill(is_foreign_T, 0), self._weight_VE)
        return self._communicator.all_reduce(x_TE.masked_fill(is_foreign_T[:, None], 0))


def rope_table(rope: RopeConfig, *, head_dim: int, max_len: int) -> torch.Tensor:
    """float32 [max_len, W]: cosines then sines of every position; formulas of transformers' modeling_rope_utils.

    W is the head's dim, or as much of it as is rotated.
    """
    width = int(head_dim * rope.rotated_part)
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, width, 2, dtype=torch.float) / width))
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3_frequencies(inv_freq, rope)
    angles = torch.arange(max_len, dtype=torch.float)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _llama3_frequencies(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    old_len = rope.original_max_positions
    low_wavelen, high_wavelen = old_len / rope.low_freq_factor, old_len / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    smooth = (old_len / wavelen - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelen >= high_wavelen) & (wavelen <= low_wavelen), smoothed, scaled)
