"""Launches of every kernel that reads or writes caches in fp8, with shapes of real models; for compile_kernels.py."""

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.kernels.fp8 import FP8, CacheScales

SHAPES = [  # (query heads, kv heads, head dim, dtype, terms): 8B Llama, gpt-oss 120B, Gemma 2 2B, SmolLM2, float32
    (32, 8, 128, torch.bfloat16, {}),
    (64, 8, 64, torch.bfloat16, {"window": 128, "sinks_H": torch.zeros(64)}),
    (8, 4, 256, torch.bfloat16, {"window": 4096, "soft_cap": 50.0}),
    (9, 3, 64, torch.float16, {}),
    (32, 8, 128, torch.float32, {}),
]
LATENTS = [(128, torch.bfloat16), (16, torch.bfloat16), (16, torch.float32)]  # DeepSeek-V3 whole and on 8 GPUs


def launch_fp8_writes(modules):
    """On every GPU: rounding is done in integers."""
    slots = torch.zeros(64, dtype=torch.int64)
    for _, num_kv_heads, head_dim, dtype, _ in SHAPES:
        k = torch.empty(64, num_kv_heads, head_dim, dtype=dtype)
        page = torch.empty(9, num_kv_heads, 16, 2 * head_dim, dtype=FP8)
        modules["kv_write"].kv_write(k, k, kv_cache=page, slot_mapping_T=slots, scales=scales_of(num_kv_heads))


def launch_fp8_reads(modules):
    """On GPUs that convert e4m3."""
    lens, starts = torch.ones(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(2, 64, dtype=torch.int32)
    for num_heads, num_kv_heads, head_dim, dtype, terms in SHAPES:
        q = torch.empty(64, num_heads, head_dim, dtype=dtype)
        page = torch.empty(9, num_kv_heads, 16, 2 * head_dim, dtype=FP8)
        rule = AttentionRule(scale=0.1, scales=scales_of(num_kv_heads), **terms)
        paged = {"kv_cache": page, "block_table_RM": table, "seq_lens_R": lens, "rule": rule}
        modules["paged_prefill"].paged_prefill(q, query_start_R1=starts, num_tokens=64, out_THD=q, **paged)
        modules["paged_decode"].paged_decode(q[:2], total_seq_len=2000, max_seq_len=1000, out_RHD=q[:2], **paged)
    for num_heads, dtype in LATENTS:
        q, out = (torch.empty(64, num_heads, dims, dtype=dtype) for dims in (576, 512))
        paged = {"kv_cache": torch.empty(9, 16, 576, dtype=FP8), "block_table_RM": table, "seq_lens_R": lens}
        paged |= {"scale": 0.1, "window": None, "scales": scales_of(1)}
        modules["latent_prefill"].latent_prefill(q, query_start_R1=starts, num_tokens=64, out_THV=out, **paged)
        modules["latent_decode"].latent_decode(q[:2], total_seq_len=2000, max_seq_len=1000, out_RHV=out[:2], **paged)


def scales_of(num_kv_heads):
    """Scales that nobody reads."""
    return CacheScales(k_K=torch.ones(num_kv_heads), v_K=torch.ones(num_kv_heads))
