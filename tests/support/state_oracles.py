"""The recurrences of StateOps once more, one token at a time in float64, and steps and inputs to try them with.

Legend: see engine/models/state_ops.py.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional

from blockferry.engine.models.state_ops import DeltaInputs, SelectiveInputs, SsdInputs, StateMetadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvInputs:
    """The arguments of StateOps.causal_conv as one value."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def tokens(self, begin, end):
        return dataclasses.replace(self, x=self.x[begin:end])

    def cast(self, dtype):
        bias = None if self.bias is None else self.bias.to(dtype)
        return ConvInputs(x=self.x.to(dtype), weight=self.weight.to(dtype), bias=bias)


def conv_oracle(inputs, state_Cw):
    """(y, state after the tokens)."""
    outputs, window = [], state_Cw
    for x_C in inputs.x:
        window = torch.cat((window, x_C[:, None]), dim=1)
        y_C = (window * inputs.weight).sum(1)
        outputs.append(y_C if inputs.bias is None else y_C + inputs.bias)
        window = window[:, 1:]
    return torch.stack(outputs), window


def selective_oracle(inputs, state_CN):
    """(y, state after the tokens)."""
    outputs, state = [], state_CN
    for x_C, dt_C, b_N, c_N in zip(inputs.x_TC, inputs.dt_TC, inputs.b_TN, inputs.c_TN):
        state = torch.exp(dt_C[:, None] * inputs.a_CN) * state + torch.outer(dt_C * x_C, b_N)
        outputs.append(state @ c_N + inputs.d_C * x_C)
    return torch.stack(outputs), state


def ssd_oracle(inputs, state_HPN):
    """(y, state after the tokens)."""
    num_heads = state_HPN.shape[0]
    heads_per_group = num_heads // inputs.b_TGN.shape[1]
    outputs, state = [], state_HPN
    for x_HP, dt_H, b_GN, c_GN in zip(inputs.x_THP, inputs.dt_TH, inputs.b_TGN, inputs.c_TGN):
        b_HN, c_HN = (x.repeat_interleave(heads_per_group, dim=0) for x in (b_GN, c_GN))
        added = torch.einsum("h,hp,hn->hpn", dt_H, x_HP, b_HN)
        state = torch.exp(dt_H * inputs.a_H)[:, None, None] * state + added
        outputs.append(torch.einsum("hpn,hn->hp", state, c_HN) + inputs.d_H[:, None] * x_HP)
    return torch.stack(outputs), state


def delta_oracle(inputs, state_HKV):
    """(o, state after the tokens)."""
    outputs, state = [], state_HKV
    rows = zip(inputs.q_THK, inputs.k_THK, inputs.v_THV, inputs.log_decay_TH, inputs.beta_TH)
    for q_HK, k_HK, v_HV, log_decay_H, beta_H in rows:
        state = torch.exp(log_decay_H)[:, None, None] * state
        found = torch.einsum("hk,hkv->hv", k_HK, state)
        state = state + torch.einsum("hk,hv->hkv", k_HK, beta_H[:, None] * (v_HV - found))
        outputs.append(torch.einsum("hk,hkv->hv", q_HK, state))
    return torch.stack(outputs), state


def make_conv(num_tokens, generator, *, scale=1.0, channels=6, taps=4, has_bias=True):
    def randn(*shape):
        return torch.randn(shape, generator=generator)

    bias = randn(channels) if has_bias else None
    return ConvInputs(x=randn(num_tokens, channels), weight=randn(channels, taps), bias=bias)


def make_selective(num_tokens, generator, *, scale=1.0, channels=5, state_size=4):
    """scale is that of the step sizes: 100 makes decays vanish, 0.001 makes them last."""

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return SelectiveInputs(
        x_TC=randn(num_tokens, channels),
        dt_TC=scale * functional.softplus(randn(num_tokens, channels)),
        a_CN=-torch.rand((channels, state_size), generator=generator) * state_size - 0.01,
        b_TN=randn(num_tokens, state_size),
        c_TN=randn(num_tokens, state_size),
        d_C=randn(channels),
    )


def make_ssd(num_tokens, generator, *, scale=1.0, heads=4, head_dim=3, state_size=5, groups=2):
    """scale is that of the step sizes."""

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return SsdInputs(
        x_THP=randn(num_tokens, heads, head_dim),
        dt_TH=scale * functional.softplus(randn(num_tokens, heads)),
        a_H=-torch.rand(heads, generator=generator) * 8 - 0.01,
        b_TGN=randn(num_tokens, groups, state_size),
        c_TGN=randn(num_tokens, groups, state_size),
        d_H=randn(heads),
    )


def make_delta(num_tokens, generator, *, scale=1.0, heads=2, key_dim=8, value_dim=6):
    """scale is that of the logarithms of the decays."""

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return DeltaInputs(
        q_THK=functional.normalize(randn(num_tokens, heads, key_dim), dim=-1) * key_dim**-0.5,
        k_THK=functional.normalize(randn(num_tokens, heads, key_dim), dim=-1),
        v_THV=randn(num_tokens, heads, value_dim),
        log_decay_TH=-scale * functional.softplus(randn(num_tokens, heads)),
        beta_TH=torch.rand((num_tokens, heads), generator=generator),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """One method of StateOps with its oracle."""

    name: str
    state_shape: tuple[int, ...]  # of make()'s default sizes
    make: Callable[..., object]
    oracle: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    run: Callable[..., torch.Tensor]  # (ops, inputs, state_B, metadata)


RECURRENCES = [
    Recurrence(
        name="causal_conv",
        state_shape=(6, 3),
        make=make_conv,
        oracle=conv_oracle,
        run=lambda ops, inputs, state, metadata: ops.causal_conv(
            inputs.x, inputs.weight, inputs.bias, state_BCw=state, metadata=metadata
        ),
    ),
    Recurrence(
        name="selective_scan",
        state_shape=(5, 4),
        make=make_selective,
        oracle=selective_oracle,
        run=lambda ops, inputs, state, metadata: ops.selective_scan(inputs, state_BCN=state, metadata=metadata),
    ),
    Recurrence(
        name="ssd_scan",
        state_shape=(4, 3, 5),
        make=make_ssd,
        oracle=ssd_oracle,
        run=lambda ops, inputs, state, metadata: ops.ssd_scan(inputs, state_BHPN=state, metadata=metadata),
    ),
    Recurrence(
        name="gated_delta",
        state_shape=(2, 8, 6),
        make=make_delta,
        oracle=delta_oracle,
        run=lambda ops, inputs, state, metadata: ops.gated_delta(inputs, state_BHKV=state, metadata=metadata),
    ),
]


def make_step(query_lens, *, num_decode_rows=0, source=None, target=None, fresh=(), device="cpu"):
    """A step whose row r reads block r and writes block r, unless told otherwise; fresh holds rows that start."""
    num_rows = len(query_lens)
    starts = [sum(query_lens[:row]) for row in range(num_rows + 1)]
    is_fresh = [row in fresh for row in range(num_rows)]
    return StateMetadata(
        num_rows=num_rows,
        num_decode_rows=num_decode_rows,
        num_tokens=starts[-1],
        query_start_R1=torch.tensor(starts, dtype=torch.int32, device=device),
        source_R=torch.tensor(range(num_rows) if source is None else source, device=device),
        target_R=torch.tensor(range(num_rows) if target is None else target, device=device),
        is_fresh_R=torch.tensor(is_fresh, device=device),
        query_lens=list(query_lens),
        is_fresh=is_fresh,
    )


def make_pool(num_blocks, shape, *, dtype=torch.float32, gap=7, fill=float("nan"), device="cpu"):
    """(pages, states): states is a view of pages strided over blocks, with bytes of others between them."""
    num_elements = torch.Size(shape).numel()
    pages = torch.full((num_blocks, num_elements + gap), fill, dtype=dtype, device=device)
    return pages, pages[:, 3 : 3 + num_elements].view(num_blocks, *shape)


def run_oracle(recurrence, inputs, state_B, metadata):
    """(outputs, states of the rows after the step), both float64; nothing is written."""
    wide, outputs, states = inputs.cast(torch.float64), [], []
    begin = 0
    for row, num_tokens in enumerate(metadata.query_lens):
        state = state_B[0].double()
        state = torch.zeros_like(state) if metadata.is_fresh[row] else state_B[metadata.source_R[row]].double()
        out, state = recurrence.oracle(wide.tokens(begin, begin + num_tokens), state)
        outputs.append(out)
        states.append(state)
        begin += num_tokens
    return torch.cat(outputs), torch.stack(states)
