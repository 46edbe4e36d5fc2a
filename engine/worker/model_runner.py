"""Runs one rank's part of the model over one step's inputs and hands logits to whoever samples.

Owns the model, the attention backend and the views of the KV pages. Knows nothing of plans or parameters.

Legend: T tokens, S tokens that want logits, E hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata
from blockferry.engine.models.registry import CausalModel
from blockferry.engine.request import Int64Array
from blockferry.engine.worker.inputs import StepInputs
from blockferry.engine.worker.kv_cache import KVPool
from blockferry.engine.worker.parallel import Parallel


class ModelRunner:
    """The model bound to its pages. The worker's model thread calls it."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        pool: KVPool,
        *,
        parallel: Parallel,
        hidden_TE: torch.Tensor,
    ) -> None:
        """`hidden_TE` receives hidden states of an earlier stage: [max_num_batched_tokens, E], the model's dtype."""
        self._model = model
        self._attention = attention
        self._pages = pool.layers
        self._parallel = parallel
        self._hidden_TE = hidden_TE
        self._scale = model.config.head_dim**-0.5

    def forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute the step: hidden states [T, E] on the last stage, None on others, which passed them on."""
        shard = self._model.shard
        if shard.is_first_stage:
            x_TE = self._model.embed(inputs.token_ids_T)
        else:
            x_TE = self._parallel.receive_hidden(self._hidden_TE[: inputs.num_tokens])
        step = _StepAttention(self._attention, self._pages, inputs.metadata[0], self._scale)
        x_TE = self._model.forward(x_TE, inputs.positions_T, step.attend)
        if shard.is_last_stage:
            return x_TE
        self._parallel.send_hidden(x_TE)
        return None

    def logits(self, hidden_TE: torch.Tensor, tokens_S: Int64Array) -> torch.Tensor | None:
        """Logits [S, V] of chosen tokens of the step, on the last stage's rank 0."""
        if len(tokens_S) == len(hidden_TE) and np.array_equal(tokens_S, np.arange(len(tokens_S))):
            return self._model.logits(hidden_TE)
        return self._model.logits(hidden_TE[torch.from_numpy(tokens_S).to(hidden_TE.device)])


class _StepAttention:
    """Binds layer numbers to pages for one step."""

    def __init__(
        self, backend: AttentionBackend, pages: list[torch.Tensor], metadata: AttentionMetadata, scale: float
    ) -> None:
        self._forward = backend.forward
        self._pages = pages
        self._metadata = metadata
        self._scale = scale

    def attend(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        return self._forward(
            q_THD, k_TKD, v_TKD, kv_cache=self._pages[layer], metadata=self._metadata, scale=self._scale
        )
