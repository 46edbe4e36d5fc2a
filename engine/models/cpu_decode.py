"""A whole decode step of a decoder's layers as one call on CPUs with AMX: bfloat16, one rank, up to 64 rows.

Same kernels and same results as layer by layer; what it saves is Python. All keys and values of a layer are stored
before any row attends, so rows may be tokens that follow each other in one sequence, as they are where drafts are
verified. Owns the buffers that the kernels work in.

    x, residual [64, E]   qkv [64, H + 2K, D]   attended [64, H, D]   gated [64, 2F]   activated [64, F]

Legend: R rows, M blocks of the longest row, E hidden, F feed-forward, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule
from blockferry.engine.config import cache_dir
from blockferry.engine.models.cpu_linear import CpuLinear
from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.tape_source import DenseLayer, TapeSource
from blockferry.kernels.cpu_emit import LANES, Element
from blockferry.kernels.cpu_kv_write import KvWrite
from blockferry.kernels.cpu_launch import KernelStore, Launcher, kernel_store
from blockferry.kernels.cpu_linear import MAX_FEW_ROWS
from blockferry.kernels.cpu_paged_decode import PagedDecode
from blockferry.kernels.cpu_rms_norm import RmsNorm
from blockferry.kernels.cpu_rotary import Rotary
from blockferry.kernels.cpu_silu_mul import SiluMul
from blockferry.kernels.cpu_tape import Tape, TapedKernel

MAX_ROWS = MAX_FEW_ROWS


class TapedDecode:
    """The layers of one model over one pool. Called by one thread."""

    def __init__(self, model: Decoder, pages: Sequence[torch.Tensor]) -> None:
        """`pages` are the layers' [B, K, N, 2*D] views. Raises ValueError for a model that can_tape() refuses."""
        if model.tape_source is None or not can_tape(model, pages):
            raise ValueError("the model cannot be taped; see can_tape()")
        store, source = kernel_store(cache_dir() / "kernels"), model.tape_source
        self._buffers = _Buffers(source, block_size=pages[0].shape[2])
        recorder = _Recorder(source, self._buffers, store)
        for layer, layer_pages in zip(source.layers, pages):
            recorder.record_layer(layer, layer_pages)
        self._tape = Tape(recorder.kernels, store)

    def accepts(self, metadata: AttentionMetadata) -> bool:
        """Whether a step is one that the tape can run."""
        num_rows, num_columns = metadata.block_table_RM.shape
        is_decode = metadata.num_decode_rows == metadata.num_tokens == num_rows
        return is_decode and num_rows <= MAX_ROWS and num_columns <= self._buffers.table_RM.shape[1]

    def forward(self, x_RE: torch.Tensor, positions_R: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [R, E] after the layers, of a step that accepts() takes."""
        buffers, num_rows = self._buffers, len(x_RE)
        buffers.residual_RE[:num_rows] = x_RE
        buffers.positions_R[:num_rows] = positions_R
        buffers.seq_lens_R[:num_rows] = metadata.seq_lens_R
        buffers.slots_R[:num_rows] = metadata.slot_mapping_T
        buffers.table_RM[:num_rows, : metadata.block_table_RM.shape[1]] = metadata.block_table_RM
        self._tape.run(num_rows, torch.get_num_threads())
        return buffers.residual_RE[:num_rows] + buffers.x_RE[:num_rows]


def can_tape(model: Decoder, pages: Sequence[torch.Tensor]) -> bool:
    """Whether every layer's kernels can run from memory alone: tiled bfloat16 layers, heads of whole vectors."""
    source = model.tape_source
    if source is None or not pages or any(page.dtype is not torch.bfloat16 for page in pages):
        return False
    return all(isinstance(linear, CpuLinear) for linear in model.layer_linears) and source.head_dim % LANES == 0


class _Buffers:
    """Memory of a step, reused by every step."""

    def __init__(self, source: TapeSource, *, block_size: int) -> None:
        num_heads, num_kv_heads, num_features = source.num_heads, source.num_kv_heads, source.num_features

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros((MAX_ROWS, *shape), dtype=torch.bfloat16)

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


class _Recorder:
    """Turns layers into kernels over the buffers."""

    def __init__(self, source: TapeSource, buffers: _Buffers, store: KernelStore) -> None:
        launcher = Launcher(store)
        self.kernels: list[TapedKernel] = []
        self._source = source
        self._buffers = buffers
        self._norm, self._rotary, self._silu = RmsNorm(launcher), Rotary(launcher), SiluMul(launcher)
        self._write, self._decode = KvWrite(launcher), PagedDecode(launcher)

    def record_layer(self, layer: DenseLayer, pages: torch.Tensor) -> None:
        """Append one layer; it begins with x to add to the residual, but for the first one."""
        buffers = self._buffers
        if self.kernels:
            self._add_norm(layer.attention_norm_E)
        else:
            self._heads_norm(buffers.residual_RE[:, None], layer.attention_norm_E, buffers.x_RE[:, None])
        self._linear(layer.qkv, buffers.x_RE, buffers.qkv_RHD.flatten(1))
        for heads, weight_D in ((buffers.q_RHD, layer.q_norm_D), (buffers.k_RKD, layer.k_norm_D)):
            if weight_D is not None:
                self._heads_norm(heads, weight_D, heads)
        self._rotate()
        self._attend(pages)
        self._linear(layer.out, buffers.attended_RHD.flatten(1), buffers.x_RE)
        self._add_norm(layer.mlp_norm_E)
        self._linear(layer.gate_up, buffers.x_RE, buffers.gated_R2F)
        kernel = self._silu.prepare(Element.BFLOAT16)
        arguments = self._silu.arguments(buffers.gated_R2F, buffers.activated_RF)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=1))
        self._linear(layer.down, buffers.activated_RF, buffers.x_RE)

    def _add_norm(self, weight_E: torch.Tensor) -> None:
        buffers, eps = self._buffers, self._source.norm_eps
        kernel = self._norm.prepare_add_norm(Element.BFLOAT16)
        arguments = self._norm.add_norm_arguments(buffers.x_RE, buffers.residual_RE, weight_E, eps)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=1))

    def _heads_norm(self, x_RHD: torch.Tensor, weight_D: torch.Tensor, out_RHD: torch.Tensor) -> None:
        kernel = self._norm.prepare_norm(Element.BFLOAT16)
        arguments = self._norm.norm_arguments(x_RHD, weight_D, self._source.norm_eps, out_RHD)
        self.kernels.append(TapedKernel(kernel=kernel, arguments=arguments, items_per_row=x_RHD.shape[1]))

    def _linear(self, linear: object, x_RE: torch.Tensor, out_RF: torch.Tensor) -> None:
        assert isinstance(linear, CpuLinear), "can_tape() looked at every layer"
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
