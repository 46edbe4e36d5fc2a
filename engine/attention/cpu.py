"""The CPU attention backend: decode rows attend from the pages in one jitted kernel, prefill rows gather first.

float32 computes scores and softmax in float32; half types accumulate in float32. Of windows and chunks only what is
in reach is read.

Legend: T tokens of the step, R rows, Q tokens of one row in this step, S tokens of one row in all, H query heads, K kv
heads, G query heads per kv head, D head dim, B blocks, N block size, M blocks of the longest row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule
from blockferry.engine.config import cache_dir
from blockferry.kernels.attention_terms import attend_dense, first_in_reach, seen_keys
from blockferry.kernels.cpu_kv_write import KvWrite
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_paged_decode import PagedDecode, decode_oracle
from blockferry.kernels.cpu_paged_prefill import PagedPrefill

QUERY_TILE = 128  # queries of a prefill row whose scores are in memory together, where torch does not fuse them


class CpuAttention(AttentionBackend):
    """Paged attention on torch's CPU threads. Called by the worker's model thread only.

    Kernels are compiled at their first use on a machine, a few seconds, and kept in the cache folder.
    """

    def __init__(self) -> None:
        launcher = Launcher(kernel_store(cache_dir() / "kernels"))
        self._decode = PagedDecode(launcher)
        self._prefill = PagedPrefill(launcher)
        self._write = KvWrite(launcher)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Returns [T, H, D]; see AttentionBackend. Tokens past num_tokens come back undefined."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        rows = metadata.num_decode_rows
        if rows == metadata.num_tokens == len(q_THD) and not metadata.shares_writes:  # all of it: nothing to slice
            self._decode_rows((q_THD, k_TKD, v_TKD), kv_cache, metadata, rule, out_THD=out_THD)
            return out_THD
        tokens = slice(0 if metadata.shares_writes else rows, metadata.num_tokens)
        # before any row attends: a decode row may have its prefix from a row that is computed beside it
        self._write(k_TKD[tokens], v_TKD[tokens], kv_cache, metadata.slot_mapping_T[tokens])
        if rows:
            qkv = (q_THD[:rows], k_TKD[:rows], v_TKD[:rows])
            self._decode_rows(qkv, kv_cache, metadata, rule, out_THD=out_THD[:rows])
        start = rows
        for row in range(rows, metadata.num_rows):
            query = slice(start, start + metadata.query_lens[row])
            q_QHD, block_table_M, seq_len = q_THD[query], metadata.block_table_RM[row], metadata.seq_lens[row]
            if self._prefill.accepts(q_QHD, kv_cache):
                self._prefill(q_QHD, kv_cache, block_table_M, seq_len=seq_len, rule=rule, out_QHD=out_THD[query])
            else:
                out_THD[query] = attend_pages(q_QHD, kv_cache, block_table_M, seq_len=seq_len, rule=rule)
            start = query.stop
        return out_THD

    def _decode_rows(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
        *,
        out_THD: torch.Tensor,
    ) -> None:
        """Write and attend the decode rows, which are exactly the tokens of qkv and out."""
        q_RHD, k_RKD, v_RKD = qkv
        num_rows = len(q_RHD)
        block_table_RM, seq_lens_R = metadata.block_table_RM, metadata.seq_lens_R
        if self._decode.accepts(q_RHD, k_RKD, v_RKD, kv_cache):
            self._decode(
                qkv,
                kv_cache,
                block_table_RM=block_table_RM,
                seq_lens_R=seq_lens_R,
                slot_mapping_R=metadata.slot_mapping_T,
                rule=rule,
                out_RHD=out_THD,
            )
            return
        self._write(k_RKD, v_RKD, kv_cache, metadata.slot_mapping_T[:num_rows])
        out_THD[:] = decode_oracle(
            q_RHD, kv_cache, block_table_RM=block_table_RM[:num_rows], seq_lens_R=seq_lens_R[:num_rows], rule=rule
        )


def attend_pages(
    q_QHD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_M: torch.Tensor,
    *,
    seq_len: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """[Q, H, D]: attention of the last Q of a row's tokens, by torch. Reads no block before the reach of the first.

    Queries are taken in tiles, each over the keys in its reach: cost grows with the reach, not with the sequence.
    """
    start = seq_len - len(q_QHD)
    first = first_in_reach(rule, start)
    kv_KSC = gather_row(kv_cache, block_table_M, first=first, seq_len=seq_len)
    is_exotic = rule.soft_cap is not None or rule.sinks_H is not None
    if not is_exotic and first_in_reach(rule, seq_len - 1) == 0:
        return attend_causally(q_QHD, kv_KSC, rule.scale)
    parts = []
    for offset in range(0, len(q_QHD), QUERY_TILE):
        tile_QHD = q_QHD[offset : offset + QUERY_TILE]
        queries_Q = torch.arange(start + offset, start + offset + len(tile_QHD))
        low, end = first_in_reach(rule, start + offset), start + offset + len(tile_QHD)
        tile_KSC = kv_KSC[:, low - first : end - first]
        seen_QS = seen_keys(rule, queries_Q, torch.arange(low, end))
        if is_exotic:
            parts.append(attend_dense(tile_QHD[None], tile_KSC[None], seen_QS[None], rule)[0])
        else:
            mask_QS = torch.zeros(seen_QS.shape, dtype=q_QHD.dtype).masked_fill(~seen_QS, -torch.inf)
            parts.append(_attend_masked(tile_QHD, tile_KSC, mask_QS, rule.scale))
    return torch.cat(parts)


def gather_row(kv_cache: torch.Tensor, block_table_M: torch.Tensor, *, first: int, seq_len: int) -> torch.Tensor:
    """[K, S, 2*D]: one row's keys and values from the first in reach on, copied out of its pages."""
    block_size = kv_cache.shape[2]
    column = first // block_size
    blocks = block_table_M[column : -(-seq_len // block_size)]
    return (
        kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, first - column * block_size : seq_len - column * block_size]
    )


def attend_causally(q_QHD: torch.Tensor, kv_KSC: torch.Tensor, scale: float) -> torch.Tensor:
    """[Q, H, D]: causal attention of the last Q of a row's S tokens."""
    num_queries, seq_len = len(q_QHD), kv_KSC.shape[1]
    mask_QS = None
    if 1 < num_queries < seq_len:
        visible_QS = torch.ones(num_queries, seq_len, dtype=torch.bool).tril(seq_len - num_queries)
        mask_QS = torch.zeros(num_queries, seq_len, dtype=q_QHD.dtype).masked_fill(~visible_QS, -torch.inf)
    return _attend_masked(q_QHD, kv_KSC, mask_QS, scale)


def _attend_masked(
    q_QHD: torch.Tensor, kv_KSC: torch.Tensor, mask_QS: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[Q, H, D]; without a mask one query sees all keys, and as many queries as keys are causal."""
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads, seq_len, _ = kv_KSC.shape
    group_size = num_heads // num_kv_heads
    # grouped heads as a batch of views: enable_gqa would copy every key and value for each query head
    q_KGQD = q_QHD.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    k_KGSD, v_KGSD = kv_KSC[:, None].expand(-1, group_size, -1, -1).tensor_split(2, dim=-1)
    is_causal = mask_QS is None and num_queries == seq_len > 1
    out_KGQD = functional.scaled_dot_product_attention(
        q_KGQD, k_KGSD, v_KGSD, attn_mask=mask_QS, is_causal=is_causal, scale=scale
    )
    return out_KGQD.flatten(0, 1).transpose(0, 1)
