"""Decoder layers as kernels of a tape on CPUs with AMX: the memory they work in, and what of them is recorded.

Owns the buffers. What runs before and after the layers, and when, is decided elsewhere (cpu_decode.py, cpu_draft.py).

    x, residual [64, E]   qkv [64, H + 2K, D]   attended [64, H, D]   gated [64, 2F]   activated [64, F]

All keys and values of a layer are stored before any row attends, so rows may be tokens that follow each other in one
sequence, as they are where drafts are verified.

Legend: R rows, M blocks of the longest row, E hidden, F feed-forward, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule
from blockferry.engine.models.cpu_linear import CpuLinear
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.tape_source import DenseLayer, TapeSource
from blockferry.kernels.cpu_emit import Element
from blockferry.kernels.cpu_kv_write import KvWrite
from blockferry.kernels.cpu_launch import KernelStore, Launcher
from blockferry.kernels.cpu_linear import MAX_FEW_ROWS
from blockferry.kernels.cpu_paged_decode import PagedDecode
from blockferry.kernels.cpu_rms_norm import RmsNorm
from blockferry.kernels.cpu_rotary import Rotary
from blockferry.kernels.cpu_silu_mul import SiluMul
from blockferry.kernels.cpu_tape import TapedKernel

MAX_ROWS = MAX_FEW_ROWS


class LayerBuffers:
    """Memory of a step, reused by every step."""

    def __init__(self, source: TapeSource, *, block_size: int) -> None:
        num_heads, num_kv_heads, num_features = source.num_heads, source.num_kv_heads, source.num_features
        make = make_rows
        self.x_RE, self.residual_RE = make(source.hidden_size), make(source.hidden_size)
        self.qkv_RHD = make(num_heads + 2 * num_kv_heads, source.head_dim)
        self.q_RHD, self.k_RKD, self.v_RKD = self.qkv_RHD.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], 1)
        self.attended_RHD = make(num_heads, source.head_dim)
        self.gated_R2F, self.activated_RF = make(2 * num_features), make(num_features)
        self.positions_R = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self.slots_R = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self.no_slots_R = torch.full((MAX_ROWS,), -1, dtype=torch.int64)  # attention has nothing left to write
        self.seq_lens_R = torch.zeros(MAX_ROWS, dtype=torch.int32)
        num_columns = -(-len(source.cos_sin) // block_size)
        self.table_RM = torch.zeros((MAX_ROWS, num_columns), dtype=torch.int32)

    def accepts(self, metadata: AttentionMetadata) -> bool:
        """Whether a step fits, and all of its rows are of one token."""
        num_rows, num_columns = metadata.block_table_RM.shape
        is_decode = metadata.num_decode_rows == metadata.num_tokens == num_rows
        return is_decode and num_rows <= MAX_ROWS and num_columns <= self.table_RM.shape[1]

    def place(self, positions_R: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Say where the rows of a step that accepts() takes stand."""
        num_rows = len(positions_R)
        self.positions_R[:num_rows] = positions_R
        self.seq_lens_R[:num_rows] = metadata.seq_lens_R
        self.slots_R[:num_rows] = metadata.slot_mapping_T
        self.table_RM[:num_rows, : metadata.block_table_RM.shape[1]] = metadata.block_table_RM


def make_rows(*shape: int) -> torch.Tensor:
    """bfloat16 [64, *shape]."""
    return torch.zeros((MAX_ROWS, *shape), dtype=torch.bfloat16)


class LayerRecorder:
    """Turns layers into kernels over the buffers."""

    def __init__(self, source: TapeSource, buffers: LayerBuffers, store: KernelStore) -> None:
        launcher = Launcher(store)
        self.kernels: list[TapedKernel] = []
        self._source = source
        self._buffers = buffers
        self._rms_norm, self._rotary, self._silu = RmsNorm(launcher), Rotary(launcher), SiluMul(launcher)
        self._write, self._decode = KvWrite(launcher), PagedDecode(launcher)

    def record_layer(self, layer: DenseLayer, pages: torch.Tensor) -> None:
        """Append one layer but for its first norm: from what is normed in x to what is to be added to the residual."""
        buffers = self._buffers
        self.linear(layer.qkv, buffers.x_RE, buffers.qkv_RHD.flatten(1))
        for heads, weight_D in ((buffers.q_RHD, layer.q_norm_D), (buffers.k_RKD, layer.k_norm_D)):
            if weight_D is not None:
                self.norm(heads, weight_D, heads)
        self._rotate()
        self._attend(pages)
        self.linear(layer.out, buffers.attended_RHD.flatten(1), buffers.x_RE)
        self.add_norm(layer.mlp_norm_E)
        self.linear(layer.gate_up, buffers.x_RE, buffers.gated_R2F)
        kernel = self._silu.prepare(Element.BFLOAT16)
        arguments = self._silu.arguments(buffers.gated_R2F, buffers.activated_RF)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=1))
        self.linear(layer.down, buffers.activated_RF, buffers.x_RE)

    def add_norm(self, weight_E: torch.Tensor) -> None:
        """Append: x is added to the residual, and becomes its norm."""
        buffers, eps = self._buffers, self._source.norm_eps
        kernel = self._rms_norm.prepare_add_norm(Element.BFLOAT16)
        arguments = self._rms_norm.add_norm_arguments(buffers.x_RE, buffers.residual_RE, weight_E, eps)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=1))

    def norm(self, x_RHD: torch.Tensor, weight_D: torch.Tensor, out_RHD: torch.Tensor) -> None:
        """Append: the norm of each head of x, which may be out."""
        kernel = self._rms_norm.prepare_norm(Element.BFLOAT16)
        arguments = self._rms_norm.norm_arguments(x_RHD, weight_D, self._source.norm_eps, out_RHD)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=x_RHD.shape[1]))

    def linear(self, linear: Linear, x_RE: torch.Tensor, out_RF: torch.Tensor) -> None:
        """Append a linear layer, which is a CpuLinear."""
        assert isinstance(linear, CpuLinear), "who records looked at every layer"
        tiled = linear.tiled
        arguments = (0, *tiled.arguments(x_RE, out_RF))
        self.kernels.append(
            TapedKernel(
                kernel=tiled.few_rows, arguments=arguments, fixed_items=tiled.num_items, threads_at=0, rows_at=1
            )
        )

    def _rotate(self) -> None:
        buffers = self._buffers
        arguments = self._rotary.arguments(buffers.q_RHD, buffers.k_RKD, self._source.cos_sin, buffers.positions_R)
        kernel = self._rotary.prepare(Element.BFLOAT16)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=1))

    def _attend(self, pages: torch.Tensor) -> None:
        buffers, source = self._buffers, self._source
        num_kv_heads = buffers.k_RKD.shape[1]
        arguments = self._write.arguments(buffers.k_RKD, buffers.v_RKD, pages, buffers.slots_R)
        self.kernels.append(TapedKernel(kernel=self._write.prepare(), arguments=arguments, items_per_row=1))
        kernel = self._decode.prepare(
            Element.BFLOAT16, head_dim=source.head_dim, group_size=buffers.q_RHD.shape[1] // num_kv_heads
        )
        arguments = self._decode.arguments(
            (buffers.q_RHD, buffers.k_RKD, buffers.v_RKD),
            pages,
            block_table_RM=buffers.table_RM,
            seq_lens_R=buffers.seq_lens_R,
            slot_mapping_R=buffers.no_slots_R,
            rule=AttentionRule(scale=source.head_dim**-0.5),
            out_RHD=buffers.attended_RHD,
        )
        self.kernels.append(
            TapedKernel(kernel=kernel, arguments=(0, *arguments), items_per_row=num_kv_heads, threads_at=0)
        )
