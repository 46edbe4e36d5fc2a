"""A whole decode step of a decoder's layers as one call on CPUs with AMX: bfloat16, one rank, up to 64 rows.

Same kernels and same results as layer by layer; what it saves is Python.

Legend: R rows, E hidden, K KV heads, D head dim, B blocks, N block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.config import cache_dir
from blockferry.engine.models.cpu_layer_tape import LayerBuffers, LayerRecorder
from blockferry.engine.models.cpu_linear import CpuLinear
from blockferry.engine.models.decoder import Decoder
from blockferry.kernels.cpu_emit import LANES
from blockferry.kernels.cpu_launch import kernel_store
from blockferry.kernels.cpu_tape import Tape


class TapedDecode:
    """The layers of one model over one pool. Called by one thread."""

    def __init__(self, model: Decoder, pages: Sequence[torch.Tensor]) -> None:
        """`pages` are the layers' [B, K, N, 2*D] views. Raises ValueError for a model that can_tape() refuses."""
        if model.tape_source is None or not can_tape(model, pages):
            raise ValueError("the model cannot be taped; see can_tape()")
        store, source = kernel_store(cache_dir() / "kernels"), model.tape_source
        buffers = self._buffers = LayerBuffers(source, block_size=pages[0].shape[2])
        recorder = LayerRecorder(source, buffers, store)
        first = source.layers[0]
        recorder.norm(buffers.residual_RE[:, None], first.attention_norm_E, buffers.x_RE[:, None])
        for layer, layer_pages in zip(source.layers, pages):
            if layer is not first:
                recorder.add_norm(layer.attention_norm_E)
            recorder.record_layer(layer, layer_pages)
        self._tape = Tape(recorder.kernels, store)

    def accepts(self, metadata: AttentionMetadata) -> bool:
        """Whether a step is one that the tape can run."""
        return self._buffers.accepts(metadata)

    def forward(self, x_RE: torch.Tensor, positions_R: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [R, E] after the layers, of a step that accepts() takes."""
        buffers, num_rows = self._buffers, len(x_RE)
        buffers.residual_RE[:num_rows] = x_RE
        buffers.place(positions_R, metadata)
        self._tape.run(num_rows, torch.get_num_threads())
        return buffers.residual_RE[:num_rows] + buffers.x_RE[:num_rows]


def can_tape(model: Decoder, pages: Sequence[torch.Tensor]) -> bool:
    """Whether every layer's kernels can run from memory alone: tiled bfloat16 layers, heads of whole vectors."""
    source = model.tape_source
    if source is None or not pages or any(page.dtype is not torch.bfloat16 for page in pages):
        return False
    return all(isinstance(linear, CpuLinear) for linear in model.layer_linears) and source.head_dim % LANES == 0
