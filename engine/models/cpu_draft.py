"""A pass of a module that drafts (mtp.py) as one call on CPUs with AMX: bfloat16, one rank, up to 64 rows.

A pass reads few weights, so that Python between its kernels would take most of its time. Same kernels and same results
as mtp.py's; owns the buffers that they work in.

    embedded [64, E] -- norm --+
                               +-- joined [64, 2 E] -- projection -- layer --+-- residual -- norm -- x
    hidden [64, E] ---- norm --+

Legend: R rows, E hidden, K KV heads, D head dim, B blocks, N block size.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.config import cache_dir
from blockferry.engine.models.cpu_layer_tape import LayerBuffers, LayerRecorder, make_rows
from blockferry.engine.models.cpu_linear import CpuLinear
from blockferry.engine.models.mtp import Drafter, DraftOutput, MtpModule
from blockferry.kernels.cpu_emit import LANES
from blockferry.kernels.cpu_launch import kernel_store
from blockferry.kernels.cpu_tape import Tape


class TapedModule:
    """One module over its pages. Called by one thread."""

    def __init__(self, drafter: Drafter, depth: int, pages: torch.Tensor) -> None:
        """`pages` is the layer's [B, K, N, 2*D] view. Raises ValueError for a module that can_tape_module() refuses."""
        module = drafter.modules[depth]
        source = module.draft_layer.source
        if source is None or not can_tape_module(module, pages):
            raise ValueError("the module cannot be taped; see can_tape_module()")
        self._drafter = drafter
        store, size = kernel_store(cache_dir() / "kernels"), source.hidden_size
        buffers = self._buffers = LayerBuffers(source, block_size=pages.shape[2])
        self._embedded_RE, self._hidden_RE, self._joined_R2E = make_rows(size), make_rows(size), make_rows(2 * size)
        recorder, joined_R1W = LayerRecorder(source, buffers, store), self._joined_R2E[:, None]
        recorder.norm(self._embedded_RE[:, None], module.embedding_norm_E, joined_R1W[..., :size])
        recorder.norm(self._hidden_RE[:, None], module.hidden_norm_E, joined_R1W[..., size:])
        recorder.linear(module.projection, self._joined_R2E, buffers.residual_RE)
        (layer,) = source.layers
        recorder.norm(buffers.residual_RE[:, None], layer.attention_norm_E, buffers.x_RE[:, None])
        recorder.record_layer(layer, pages)
        recorder.add_norm(module.last_norm_E)
        self._tape = Tape(recorder.kernels, store)

    def accepts(self, metadata: AttentionMetadata) -> bool:
        """Whether a pass is one that the tape can run."""
        return self._buffers.accepts(metadata)

    def forward(
        self, token_ids_R: torch.Tensor, hidden_RE: torch.Tensor, positions_R: torch.Tensor, metadata: AttentionMetadata
    ) -> DraftOutput:
        """Drafter.forward() of rows that accepts() takes; good until the next pass, which may read it."""
        buffers, num_rows = self._buffers, len(token_ids_R)
        self._embedded_RE[:num_rows] = self._drafter.embed(token_ids_R)
        self._hidden_RE[:num_rows] = hidden_RE
        buffers.place(positions_R, metadata)
        self._tape.run(num_rows, torch.get_num_threads())
        normed_RE, residual_RE = buffers.x_RE[:num_rows], buffers.residual_RE[:num_rows]
        return DraftOutput(
            handed_on_TE=normed_RE if self._drafter.hands_on_normed else residual_RE, normed_TE=normed_RE
        )


def can_tape_module(module: MtpModule, pages: torch.Tensor) -> bool:
    """Whether every kernel can run from memory alone, as can_tape()."""
    source = module.draft_layer.source
    if source is None or pages.dtype is not torch.bfloat16 or source.head_dim % LANES:
        return False
    linears = (module.projection, *module.draft_layer.layer.linears)
    return all(isinstance(linear, CpuLinear) for linear in linears)
