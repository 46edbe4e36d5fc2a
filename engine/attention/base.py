"""The seam between models and attention: metadata of one step and the backend protocol.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim, B blocks, L layers, N block size.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from blockferry.kernels.fp8 import CacheScales


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One cache group's view of one step. Decode rows (one token each) come first, then prefill rows."""

    num_rows: int
    num_decode_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_R1: torch.Tensor  # int32 [R+1], offsets into T
    seq_lens_R: torch.Tensor  # int32 [R], computed + scheduled tokens
    block_table_RM: torch.Tensor  # int32 [R, M], rows gathered in step order
    slot_mapping_T: torch.Tensor  # int64 [T], block_id * block_size + offset, PAD_SLOT_ID where none
    query_lens: list[int]  # host copies, so that CPU paths need no sync
    seq_lens: list[int]
    # a row reads what another row of this step writes: prefix hits within a step, drafts that are verified; so all
    # keys are written before any is read
    shares_writes: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """How one layer attends: causally over what is in reach, and what becomes of the scores.

    A query at position p reads keys at positions s <= p; with a window, s > p - window; with a chunk,
    s >= p // chunk * chunk. scores = scale * q k, then soft_cap * tanh(scores / soft_cap), then softmax, in whose
    denominator a sink adds exp(sink) to each head.
    """

    scale: float
    window: int | None = None  # tokens, the query's own included
    chunk: int | None = None  # tokens
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None  # float32, a logit per head that takes weight and gives nothing
    scales: CacheScales | None = None  # of a cache in fp8; whoever binds models to pages sets it, models do not


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the paged pool and attends over it."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,  # [B, K, N, 2*D] view of this layer, any strides with the last contiguous
        metadata: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Returns [T, H, D]; causal over each row's computed and new tokens. k and v are already rotated.

        Entries of the block table that are out of the rule's reach may be null and are never read.
        """


class LatentBackend(Protocol):
    """The same for latent attention: all heads read one vector per token, whose head is also the value."""

    def forward(
        self,
        q_THR: torch.Tensor,  # queries brought into the latent space, rotated part last
        latent_TR: torch.Tensor,
        *,
        kv_cache: torch.Tensor,  # [B, N, R] view of this layer, any strides with the last contiguous
        metadata: AttentionMetadata,
        rule: AttentionRule,
        value_dim: int,  # of R
    ) -> torch.Tensor:
        """Returns [T, H, value_dim]."""
