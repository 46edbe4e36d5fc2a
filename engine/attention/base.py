"""The seam between models and attention: metadata of one step and the backend protocol.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim, B blocks, L layers, N block size.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


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
        scale: float,
    ) -> torch.Tensor:
        """Returns [T, H, D]; causal over each row's computed and new tokens. k and v are already rotated."""
