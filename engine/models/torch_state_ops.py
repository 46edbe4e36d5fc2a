"""StateOps in plain torch on any device: the CPU path, and what faster kernels are held against.

Owns no state. A step gathers its rows' states, advances decode rows together and prefill rows one after the other,
chunk by chunk, and scatters the states to their blocks. A row's result never depends on the other rows of its step:
every product is made row by row or matrix by matrix.

Sources: Gu and Dao, "Mamba" (2023), section 3.2; Dao and Gu, "Transformers are SSMs" (2024), section 6; Yang, Kautz and
Hatamizadeh, "Gated Delta Networks" (2024), section 3.3.

Legend: T tokens of the step; S tokens of a chunk; R rows; B blocks; C channels; W taps, w = W - 1; H heads; P channels
of a head; N state size of a channel; G groups of heads that share b and c, E heads of a group; K key dim; V value dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

import torch

from blockferry.engine.models.state_ops import DeltaInputs, SelectiveInputs, SsdInputs, StateMetadata, StateOps

CHUNK_SIZE = 64  # tokens: the work inside a chunk grows with its square, the work between chunks falls with it
MAX_SCAN_ELEMENTS = 1 << 17  # of a Mamba-1 chunk [S, C, N]: 512 KiB in float32, so that a scan stays in a core's cache
MIN_SCAN_SIZE = 8
LOG_VANISHING = -60.0  # decay over this, 1e-26, adds nothing to a float32 sum of values of like size
MAX_GATHERED_ELEMENTS = 1 << 17  # of the decode rows that advance together, for the same reason


class _Inputs(Protocol):
    def tokens(self, begin: int, end: int) -> Self: ...


_I = TypeVar("_I", bound=_Inputs)


class TorchStateOps(StateOps):
    """See StateOps. Also takes float64 inputs, which are computed in float64."""

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        *,
        state_BCw: torch.Tensor,
        metadata: StateMetadata,
    ) -> torch.Tensor:
        """See StateOps."""
        dtype = _compute_dtype(x_TC)
        weight_WC = weight_CW.t().to(dtype, memory_format=torch.contiguous_format)
        bias_C = None if bias_C is None else bias_C.to(dtype)
        state_BwC = state_BCw.transpose(1, 2)
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        for span in _spans(metadata, state_BwC):
            x_RSC = x_TC[span.tokens].to(dtype).reshape(span.num_rows, span.num_tokens_per_row, x_TC.shape[1])
            window_RsC = torch.cat((_gather(state_BwC, metadata, span, dtype), x_RSC), dim=1)  # [R, w + S, C]
            out_TC[span.tokens] = _convolve(window_RsC, weight_WC, bias_C).flatten(0, 1)
            _scatter(window_RsC[:, span.num_tokens_per_row :], state_BwC, metadata, span)
        return out_TC

    def selective_scan(
        self, inputs: SelectiveInputs, *, state_BCN: torch.Tensor, metadata: StateMetadata
    ) -> torch.Tensor:
        """See StateOps."""
        out_TC = torch.empty(inputs.x_TC.shape, dtype=inputs.x_TC.dtype, device=inputs.x_TC.device)
        wide = inputs.cast(_compute_dtype(out_TC))
        elements = state_BCN.shape[1] * state_BCN.shape[2]
        chunk_size = min(CHUNK_SIZE, max(MIN_SCAN_SIZE, MAX_SCAN_ELEMENTS // elements))
        form = _Recurrence(step=_selective_step, run_chunk=_selective_chunk, chunk_size=chunk_size)
        return _advance(form, wide, state_BCN, out_TC, metadata)

    def ssd_scan(self, inputs: SsdInputs, *, state_BHPN: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        out_THP = torch.empty(inputs.x_THP.shape, dtype=inputs.x_THP.dtype, device=inputs.x_THP.device)
        wide = inputs.cast(_compute_dtype(out_THP))
        form = _Recurrence(step=_ssd_step, run_chunk=_ssd_chunk, chunk_size=CHUNK_SIZE)
        return _advance(form, wide, state_BHPN, out_THP, metadata)

    def gated_delta(self, inputs: DeltaInputs, *, state_BHKV: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        out_THV = torch.empty(inputs.v_THV.shape, dtype=inputs.v_THV.dtype, device=inputs.v_THV.device)
        wide = inputs.cast(_compute_dtype(out_THV))
        form = _Recurrence(step=_delta_step, run_chunk=_delta_chunk, chunk_size=CHUNK_SIZE)
        return _advance(form, wide, state_BHKV, out_THV, metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Recurrence(Generic[_I]):
    """Both forms of a recurrence; each advances the states in place and returns the outputs."""

    step: Callable[[_I, torch.Tensor], torch.Tensor]  # one token of each of several rows
    run_chunk: Callable[[_I, torch.Tensor], torch.Tensor]  # several tokens of one row
    chunk_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Rows that advance together: some decode rows, or one prefill row."""

    rows: slice
    tokens: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def num_tokens_per_row(self) -> int:
        return int(self.tokens.stop - self.tokens.start) // self.num_rows


def _spans(metadata: StateMetadata, state_B: torch.Tensor) -> Iterator[_Span]:
    num_decode_rows = metadata.num_decode_rows
    size = max(1, MAX_GATHERED_ELEMENTS // max(1, math.prod(state_B.shape[1:])))
    for begin in range(0, num_decode_rows, size):
        rows = slice(begin, min(begin + size, num_decode_rows))
        yield _Span(rows=rows, tokens=rows)
    end = num_decode_rows
    for row in range(num_decode_rows, metadata.num_rows):
        begin, end = end, end + metadata.query_lens[row]
        yield _Span(rows=slice(row, row + 1), tokens=slice(begin, end))


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _gather(state_B: torch.Tensor, metadata: StateMetadata, span: _Span, dtype: torch.dtype) -> torch.Tensor:
    """The rows' states before the step, a copy. The target stands in for a fresh row's source, which may be any."""
    if all(metadata.is_fresh[span.rows]):
        return torch.zeros((span.num_rows, *state_B.shape[1:]), dtype=dtype, device=state_B.device)
    is_fresh_R, target_R = metadata.is_fresh_R[span.rows], metadata.target_R[span.rows]
    source_R = torch.where(is_fresh_R, target_R, metadata.source_R[span.rows])
    state_R = state_B.index_select(0, source_R).to(dtype)  # twice as fast as indexing, on CPUs
    if any(metadata.is_fresh[span.rows]):
        state_R.masked_fill_(is_fresh_R.view(-1, *[1] * (state_R.ndim - 1)), 0)
    return state_R


def _scatter(state_R: torch.Tensor, state_B: torch.Tensor, metadata: StateMetadata, span: _Span) -> None:
    for block_id, state in zip(metadata.target_R[span.rows].tolist(), state_R.unbind()):
        state_B[block_id].copy_(state)  # half the time of index_copy_, on CPUs


def _advance(
    form: _Recurrence[_I], inputs: _I, state_B: torch.Tensor, out_T: torch.Tensor, metadata: StateMetadata
) -> torch.Tensor:
    """Fill and return out; bring the rows' states forward. Inputs have the dtype to compute in."""
    for span in _spans(metadata, state_B):
        state_R = _gather(state_B, metadata, span, _compute_dtype(out_T))
        if span.rows.stop <= metadata.num_decode_rows:
            out_T[span.tokens] = form.step(inputs.tokens(span.tokens.start, span.tokens.stop), state_R)
        else:
            for begin in range(span.tokens.start, span.tokens.stop, form.chunk_size):
                end = min(begin + form.chunk_size, span.tokens.stop)
                out_T[begin:end] = form.run_chunk(inputs.tokens(begin, end), state_R[0])
        _scatter(state_R, state_B, metadata, span)
    return out_T


def _convolve(window_RsC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    """[R, S, C] of a window of w + S inputs: tap after tap, so that channels stay the contiguous dim."""
    num_taps = weight_WC.shape[0]
    num_tokens = window_RsC.shape[1] - num_taps + 1
    y_RSC = window_RsC[:, :num_tokens] * weight_WC[0]
    for tap in range(1, num_taps):
        y_RSC.addcmul_(window_RsC[:, tap : tap + num_tokens], weight_WC[tap])
    return y_RSC if bias_C is None else y_RSC.add_(bias_C)


def _read(state_R: torch.Tensor, c_R: torch.Tensor) -> torch.Tensor:
    """State [R, .., C, N] times c [R, .., N]: [R, .., C], for a lone row what it is among others.

    A row times a matrix: a matrix times a column takes another kernel where there is but one, and twice the time.
    """
    return (c_R.unsqueeze(-2) @ state_R.transpose(-1, -2)).squeeze(-2)


def _selective_step(inputs: SelectiveInputs, state_RCN: torch.Tensor) -> torch.Tensor:
    dt_RC, x_RC = inputs.dt_TC, inputs.x_TC
    state_RCN.mul_((dt_RC.unsqueeze(-1) * inputs.a_CN).exp_())
    state_RCN.addcmul_((dt_RC * x_RC).unsqueeze(-1), inputs.b_TN.unsqueeze(1))
    return _read(state_RCN, inputs.c_TN).addcmul_(x_RC, inputs.d_C)


def _selective_chunk(inputs: SelectiveInputs, state_CN: torch.Tensor) -> torch.Tensor:
    """All states of the chunk at once: [S, C, N] of decays and of inputs, scanned."""
    dt_SC, x_SC = inputs.dt_TC, inputs.x_TC
    decay_SCN = (dt_SC.unsqueeze(-1) * inputs.a_CN).exp_()
    state_SCN = (dt_SC * x_SC).unsqueeze(-1) * inputs.b_TN.unsqueeze(1)
    state_SCN[0].addcmul_(decay_SCN[0], state_CN)
    _scan(decay_SCN, state_SCN)
    state_CN.copy_(state_SCN[-1])
    return (state_SCN @ inputs.c_TN.unsqueeze(-1)).squeeze(-1).addcmul_(x_SC, inputs.d_C)


def _scan(decay_S: torch.Tensor, state_S: torch.Tensor) -> None:
    """In place: state[s] += decay[s] * state[s - 1], s ascending; decay is overwritten.

    Odd-even reduction (Blelloch, "Prefix sums and their applications", 1990): pairs become one token each, the half as
    long sequence of them is scanned, and its states, those of the odd tokens, are carried on to the even ones.
    Decays are only ever multiplied, never divided, so that they may vanish but not overflow.
    """
    num_tokens = state_S.shape[0]
    if num_tokens == 1:
        return
    num_pairs = num_tokens // 2
    odd_decay, odd_state = decay_S[1::2], state_S[1::2]
    odd_state.addcmul_(odd_decay, state_S[: 2 * num_pairs : 2])
    odd_decay.mul_(decay_S[: 2 * num_pairs : 2])
    _scan(odd_decay, odd_state)
    even_state = state_S[2::2]
    even_state.addcmul_(decay_S[2::2], odd_state[: even_state.shape[0]])


def _ssd_step(inputs: SsdInputs, state_RHPN: torch.Tensor) -> torch.Tensor:
    num_rows, num_heads, head_dim, state_size = state_RHPN.shape
    num_groups = inputs.b_TGN.shape[1]
    dt_RH, x_RHP = inputs.dt_TH, inputs.x_THP
    state_RHPN.mul_((dt_RH * inputs.a_H).exp_()[..., None, None])
    by_group = state_RHPN.view(num_rows, num_groups, -1, state_size)  # [R, G, E * P, N]
    dx = (dt_RH.unsqueeze(-1) * x_RHP).view(num_rows, num_groups, -1, 1)
    by_group.addcmul_(dx, inputs.b_TGN.unsqueeze(2))
    y_RHP = _read(by_group, inputs.c_TGN).view(num_rows, num_heads, head_dim)
    return y_RHP.addcmul_(x_RHP, inputs.d_H.unsqueeze(-1))


def _ssd_chunk(inputs: SsdInputs, state_HPN: torch.Tensor) -> torch.Tensor:
    """The chunk as attention with decaying weights, beside what the state before it adds."""
    num_heads, head_dim, state_size = state_HPN.shape
    num_tokens, num_groups = inputs.b_TGN.shape[:2]
    dt_HS, x_HSP = inputs.dt_TH.t(), inputs.x_THP.transpose(0, 1)
    b_GSN, c_GSN = inputs.b_TGN.transpose(0, 1), inputs.c_TGN.transpose(0, 1)
    decay = _Decay(dt_HS * inputs.a_H.unsqueeze(-1))
    dx_HSP = x_HSP * dt_HS.unsqueeze(-1)

    scores_GSS = c_GSN @ b_GSN.transpose(1, 2)
    weights_GESS = decay.between_HSS.view(num_groups, -1, num_tokens, num_tokens) * scores_GSS.unsqueeze(1)
    y_HSP = weights_GESS.view(num_heads, num_tokens, num_tokens) @ dx_HSP
    state_GNe = state_HPN.view(num_groups, -1, state_size).transpose(1, 2)  # [G, N, E * P]
    read = (c_GSN @ state_GNe).view(num_groups, num_tokens, -1, head_dim).transpose(1, 2)
    y_HSP.addcmul_(read.reshape(num_heads, num_tokens, head_dim), decay.since_start_HS.unsqueeze(-1))

    kept = (dx_HSP * decay.until_end_HS.unsqueeze(-1)).view(num_groups, -1, num_tokens, head_dim)
    kept_GeS = kept.transpose(2, 3).reshape(num_groups, -1, num_tokens)  # [G, E * P, S]
    state_HPN.mul_(decay.of_chunk_H[:, None, None]).add_((kept_GeS @ b_GSN).view(state_HPN.shape))
    return y_HSP.addcmul_(x_HSP, inputs.d_H[:, None, None]).transpose(0, 1)


def _delta_step(inputs: DeltaInputs, state_RHKV: torch.Tensor) -> torch.Tensor:
    """The state is read once for key and query: q . (S + k (x) delta) = q . S + (q . k) delta."""
    q_RHK, k_RHK = inputs.q_THK, inputs.k_THK
    state_RHKV.mul_(inputs.log_decay_TH.exp()[..., None, None])
    found_RH2V = torch.stack((k_RHK, q_RHK), dim=2) @ state_RHKV
    delta_RHV = (inputs.v_THV - found_RH2V[:, :, 0]) * inputs.beta_TH.unsqueeze(-1)
    state_RHKV.addcmul_(k_RHK.unsqueeze(-1), delta_RHV.unsqueeze(-2))
    return found_RH2V[:, :, 1].addcmul((q_RHK * k_RHK).sum(-1, keepdim=True), delta_RHV)


def _delta_chunk(inputs: DeltaInputs, state_HKV: torch.Tensor) -> torch.Tensor:
    """The WY form: what each token adds depends on earlier ones through a unit triangular system, solved at once."""
    q_HSK, k_HSK, v_HSV = (x.transpose(0, 1).contiguous() for x in (inputs.q_THK, inputs.k_THK, inputs.v_THV))
    beta_HS1 = inputs.beta_TH.t().unsqueeze(-1)
    decay = _Decay(inputs.log_decay_TH.t())
    since_start_HS1 = decay.since_start_HS.unsqueeze(-1)

    system_HSS = (k_HSK @ k_HSK.transpose(1, 2)).mul_(decay.between_HSS).mul_(beta_HS1)  # the diagonal is taken as 1
    wanted_HSV = (v_HSV - since_start_HS1 * (k_HSK @ state_HKV)).mul_(beta_HS1)
    delta_HSV = torch.linalg.solve_triangular(system_HSS, wanted_HSV, upper=False, unitriangular=True)

    out_HSV = (q_HSK @ state_HKV).mul_(since_start_HS1)
    out_HSV.baddbmm_((q_HSK @ k_HSK.transpose(1, 2)).mul_(decay.between_HSS), delta_HSV)
    kept_HSK = k_HSK * decay.until_end_HS.unsqueeze(-1)
    state_HKV.mul_(decay.of_chunk_H[:, None, None]).baddbmm_(kept_HSK.transpose(1, 2), delta_HSV)
    return out_HSV.transpose(0, 1)


class _Decay:
    """Products of a chunk's decays; those that would be smaller than exp(LOG_VANISHING) are 0.

    Sums of logarithms are float64: the differences between them may be small against the sums.
    """

    def __init__(self, log_decay_HS: torch.Tensor) -> None:
        dtype = log_decay_HS.dtype
        sums_HS = log_decay_HS.double().cumsum(-1)
        between_HSS = (sums_HS.unsqueeze(-1) - sums_HS.unsqueeze(-2)).to(dtype)
        self.between_HSS = _exp(between_HSS).tril_()  # from each earlier token to each later one
        self.since_start_HS = _exp(sums_HS.to(dtype))
        self.until_end_HS = self.between_HSS[:, -1]
        self.of_chunk_H = self.since_start_HS[:, -1]


def _exp(log_decay: torch.Tensor) -> torch.Tensor:
    """In place, at most 1. What vanishes is cut to 0: subnormal numbers slow CPUs down by a factor of ten."""
    return torch.threshold_(log_decay.clamp_(min=LOG_VANISHING, max=0).exp_(), math.exp(LOG_VANISHING) * 1.01, 0.0)
