"""A step cut into what the decode kernels take and what the prefill kernels take; shared by the Triton backends.

Legend: R rows, M blocks of the longest row.
"""

from __future__ import annotations

import dataclasses

import torch

from blockferry.engine.attention.base import AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's decode rows, one token each, and the prefill rows after them."""

    metadata: AttentionMetadata
    decode_table_RM: torch.Tensor
    decode_seq_lens_R: torch.Tensor
    total_decode_len: int
    max_decode_len: int
    prefill_table_RM: torch.Tensor
    prefill_seq_lens_R: torch.Tensor
    prefill_start_R1: torch.Tensor  # counts from the step's first token, so its first entry is num_decode_rows


def split_step(metadata: AttentionMetadata) -> StepParts:
    """The parts of a step; views of its metadata."""
    decode = slice(0, metadata.num_decode_rows)
    prefill = slice(metadata.num_decode_rows, metadata.num_rows)
    decode_lens = metadata.seq_lens[decode]
    return StepParts(
        metadata=metadata,
        decode_table_RM=metadata.block_table_RM[decode],
        decode_seq_lens_R=metadata.seq_lens_R[decode],
        total_decode_len=sum(decode_lens),
        max_decode_len=max(decode_lens, default=0),
        prefill_table_RM=metadata.block_table_RM[prefill],
        prefill_seq_lens_R=metadata.seq_lens_R[prefill],
        prefill_start_R1=metadata.query_start_R1[metadata.num_decode_rows : metadata.num_rows + 1],
    )
