"""Paged pools, block tables and step metadata for attention and kernel tests.

Legend: B blocks, L layers, K kv heads, N block size, C = 2 * head dim, R rows, M blocks of a row.
"""

import itertools
import math

import torch

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# window, chunk, soft cap, whether there are sinks; reaches are smaller than a block, not a multiple of one, larger than
# any sequence
RULES = [
    (5, None, None, False),
    (37, None, None, False),
    (500, None, None, False),
    (None, 7, None, False),
    (None, 48, None, False),
    (20, 48, None, False),
    (48, 20, 3.0, False),
    (None, None, 3.0, False),
    (None, None, None, True),
    (37, None, None, True),
    (37, None, 3.0, True),
    (None, 500, 3.0, True),
]
LAYOUTS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")


def make_rule(window, chunk, soft_cap, has_sinks, *, num_heads, scale=0.5):
    """The rule of an entry of RULES."""
    sinks = make_sinks(num_heads) if has_sinks else None
    return AttentionRule(scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, sinks_H=sinks)


def make_sinks(num_heads):
    """One sink a head, from far below the scores to above them."""
    return torch.linspace(-4.0, 4.0, num_heads, device=DEVICE)


def make_pool(layout, *, num_blocks, num_layers=2, num_heads, block_size=16, head_dim, dtype, fill=None):
    """A [B, L, K, N, C] view of a contiguous pool whose axes lie in memory in the layout's order."""
    sizes = {"B": num_blocks, "L": num_layers, "H": num_heads, "N": block_size, "C": 2 * head_dim}
    shape = [sizes[axis] for axis in layout]
    pool = torch.randn(shape) if fill is None else torch.full(shape, fill)
    return pool.to(dtype).to(DEVICE).permute([layout.index(axis) for axis in "BLHNC"])


def make_table(seq_lens, *, num_blocks, block_size=16):
    """int32 [R, M]: distinct random blocks for what each row holds, block 0 elsewhere."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    assert sum(counts) < num_blocks, (counts, num_blocks)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    rows = [[free.pop() for _ in range(count)] + [0] * (max(counts) - count) for count in counts]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def poison_unused(kv_cache, table, seq_lens):
    """Set every entry that no row holds to NaN: whoever reads one shows it."""
    block_size = kv_cache.shape[2]
    used = torch.zeros(kv_cache.shape[0], block_size, dtype=torch.bool)
    for row, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            used[int(table[row, position // block_size]), position % block_size] = True
    kv_cache.permute(0, 2, 1, 3)[~used.to(kv_cache.device)] = math.nan


def drop_unreached(kv_cache, table, query_lens, seq_lens, rule):
    """Make what no query reaches null: block 0 in the table, NaN in the pages, the null block included."""
    block_size = kv_cache.shape[2]
    used = torch.zeros(kv_cache.shape[0], block_size, dtype=torch.bool)
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        start = seq_len - query_len
        first = max(0, start - (rule.window or seq_len) + 1, start // (rule.chunk or seq_len) * (rule.chunk or seq_len))
        table[row, : first // block_size] = 0
        for position in range(first, seq_len):
            used[int(table[row, position // block_size]), position % block_size] = True
    kv_cache.permute(0, 2, 1, 3)[~used.to(kv_cache.device)] = math.nan


def make_metadata(query_lens, seq_lens, table, *, block_size=16, num_decode_rows=None):
    """The metadata of one step; decode rows first, by default as many as have one query at the front."""
    if num_decode_rows is None:
        num_decode_rows = len(list(itertools.takewhile(lambda query_len: query_len == 1, query_lens)))
    starts = [0, *itertools.accumulate(query_lens)]
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens))
        for position in range(seq_len - query_len, seq_len)
    ]
    return AttentionMetadata(
        num_rows=len(query_lens),
        num_decode_rows=num_decode_rows,
        num_tokens=starts[-1],
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_R1=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_table_RM=table,
        slot_mapping_T=torch.tensor(slots, device=DEVICE),
        query_lens=list(query_lens),
        seq_lens=list(seq_lens),
    )
