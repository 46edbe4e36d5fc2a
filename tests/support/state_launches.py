"""Launches of every kernel over paged states with shapes of real models, for compile_kernels.py; nothing runs."""

import torch


def _rows(modules, num_decode_rows, num_prefill_rows, max_query_len):
    num_rows = num_decode_rows + num_prefill_rows
    blocks = torch.zeros(num_rows, dtype=torch.int64)
    return modules["state_rows"].StateRows(
        num_rows=num_rows,
        num_decode_rows=num_decode_rows,
        max_query_len=max_query_len,
        query_start_R1=torch.zeros(num_rows + 1, dtype=torch.int32),
        source_R=blocks,
        target_R=blocks,
        is_fresh_R=torch.zeros(num_rows, dtype=torch.bool),
    )


def _launch_conv(modules, rows, channels, taps, dtype):
    x, weight = torch.empty(64, channels, dtype=dtype), torch.empty(channels, taps, dtype=dtype)
    state = torch.empty(3, channels, taps - 1, dtype=dtype)
    for bias in (None, weight[:, 0].contiguous()):
        modules["causal_conv"].causal_conv(x, weight, bias, state_BCw=state, rows=rows)


def _launch_selective(modules, rows, channels, state_size, dtype):
    x, b = torch.empty(64, channels, dtype=dtype), torch.empty(64, state_size, dtype=dtype)
    a, state = torch.empty(channels, state_size), torch.empty(3, channels, state_size)
    modules["selective_scan"].selective_scan(x, x.float(), a, b, b, a[:, 0].contiguous(), state_BCN=state, rows=rows)


def _launch_ssd(modules, rows, sizes, dtype):
    heads, head_dim, state_size, groups = sizes
    x, b = torch.empty(64, heads, head_dim, dtype=dtype), torch.empty(64, groups, state_size, dtype=dtype)
    dt, state = torch.empty(64, heads), torch.empty(3, heads, head_dim, state_size)
    modules["ssd_scan"].ssd_scan(x, dt, dt[0], b, b, dt[0], state_BHPN=state, rows=rows)


def _launch_delta(modules, rows, heads, head_dim, dtype):
    q, decay = torch.empty(64, heads, head_dim, dtype=dtype), torch.empty(64, heads)
    state = torch.empty(3, heads, head_dim, head_dim)
    modules["gated_delta"].gated_delta(q, q, q, decay, decay, state_BHKV=state, rows=rows)


def launch_states(modules):
    """Decode and prefill rows of Jamba, Bamba, Falcon-H1, Qwen3-Next and LFM2 layers."""
    rows = _rows(modules, 2, 2, 300)
    _launch_conv(modules, rows, 8192, 4, torch.bfloat16)
    _launch_selective(modules, rows, 8192, 16, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        _launch_ssd(modules, rows, (128, 64, 128, 1), dtype)
        _launch_delta(modules, rows, 32, 128, dtype)
    _launch_ssd(modules, rows, (24, 64, 256, 1), torch.bfloat16)
    _launch_conv(modules, _rows(modules, 1, 0, 1), 2048, 3, torch.bfloat16)  # an argument of 1 is a constant to Triton
