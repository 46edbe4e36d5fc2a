"""Time the latent attention kernels on this machine's GPU against their rooflines.

    python tests/bench/bench_latent.py [--json FILE] [--only NAME]

The cases of bench_kernels.py for DeepSeek-V3's attention: H heads over latents of C dims, whose first V are the value.
H = 128 is one GPU's whole layer, H = 16 a rank's share of 8.

Legend: T tokens, R rows, S latents of a row, H query heads, C latent dim, V value dim, N block size.
"""

import bench_kernels
import torch
from bench_kernels import Case

from blockferry.kernels.latent_decode import latent_decode
from blockferry.kernels.latent_prefill import latent_prefill

C, V, N = 576, 512, 64
SCALE = 192**-0.5
DTYPE = torch.bfloat16


def _pages(device, rows, seq_len):
    """(one layer's pages, block table), every row in blocks of its own, shuffled."""
    blocks = -(-seq_len // N)
    pages = torch.randn(rows * blocks + 1, N, C, dtype=DTYPE, device=device)
    return pages, (torch.randperm(rows * blocks, device=device) + 1).to(torch.int32).view(rows, blocks)


def decode_case(num_heads, rows, seq_len):
    """One decode step."""

    def prepare(device):
        pages, table = _pages(device, rows, seq_len)
        q = torch.randn(rows, num_heads, C, dtype=DTYPE, device=device)
        lens, out = torch.full((rows,), seq_len, dtype=torch.int32, device=device), q.new_empty(rows, num_heads, V)
        return lambda: latent_decode(
            q,
            kv_cache=pages,
            block_table_RM=table,
            seq_lens_R=lens,
            total_seq_len=rows * seq_len,
            max_seq_len=seq_len,
            scale=SCALE,
            window=None,
            out_RHV=out,
        )

    return Case(
        name="latent_decode",
        size=f"H={num_heads} R={rows} S={seq_len}",
        num_bytes=(C * rows * seq_len + rows * num_heads * (C + V)) * DTYPE.itemsize,
        num_flops=2 * num_heads * (C + V) * rows * seq_len,
        prepare=prepare,
    )


def prefill_case(num_heads, num_queries, context):
    """One row's chunk after its context."""

    def prepare(device):
        pages, table = _pages(device, 1, context + num_queries)
        q = torch.randn(num_queries, num_heads, C, dtype=DTYPE, device=device)
        out = q.new_empty(num_queries, num_heads, V)
        starts, lens = (torch.tensor(ints, dtype=torch.int32, device=device) for ints in ([0, num_queries], [0]))
        lens += context + num_queries
        return lambda: latent_prefill(
            q,
            kv_cache=pages,
            block_table_RM=table,
            query_start_R1=starts,
            seq_lens_R=lens,
            num_tokens=num_queries,
            scale=SCALE,
            window=None,
            out_THV=out,
        )

    pairs = num_queries * (context + (num_queries + 1) / 2)
    return Case(
        name="latent_prefill",
        size=f"H={num_heads} q={num_queries} c={context}",
        num_bytes=(num_queries * num_heads * (C + V) + C * (context + num_queries)) * DTYPE.itemsize,
        num_flops=2 * num_heads * (C + V) * pairs,
        prepare=prepare,
    )


def all_cases():
    """Prefill-sized steps first, then decode-sized ones."""
    return [
        prefill_case(128, 8192, 0),
        prefill_case(16, 8192, 0),
        prefill_case(16, 512, 32_768),
        decode_case(128, 64, 4096),
        decode_case(16, 64, 4096),
        decode_case(128, 1, 131_072),
        decode_case(16, 1, 131_072),
    ]


if __name__ == "__main__":
    bench_kernels.all_cases = all_cases
    bench_kernels.main()
