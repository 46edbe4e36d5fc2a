"""Runs one rank's part of the model over one step's inputs and hands logits to whoever samples.

Owns the model and its layers' way to compute. Knows nothing of plans or parameters.

Legend: T tokens, S tokens that want logits, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.step import LayerDone, Step, nobody_waits
from blockferry.engine.request import Int64Array
from blockferry.engine.worker.inputs import EncoderInput, StepInputs
from blockferry.engine.worker.paged_caches import GroupMetadata, PagedCaches
from blockferry.engine.worker.parallel import Parallel


class LayerCompute(Protocol):
    """The layers of one stage, bound to their pages."""

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, metadata: Sequence[GroupMetadata]) -> torch.Tensor:
        """Hidden states [T, E] after the layers; metadata per cache group."""

    def encode(self, encoder_input: EncoderInput) -> None:
        """Encode one row's input into the pages of cross attention."""


class ModelRunner:
    """The model bound to its pages. The worker's model thread calls it."""

    def __init__(self, model: Decoder, layers: LayerCompute, *, parallel: Parallel, hidden_TE: torch.Tensor) -> None:
        """`hidden_TE` receives hidden states of an earlier stage: [max_num_batched_tokens, E], the model's dtype."""
        self._model = model
        self._layers = layers
        self._parallel = parallel
        self._hidden_TE = hidden_TE

    def encode(self, encoder_input: EncoderInput) -> None:
        """Encode one row's input, on every stage for itself. Before the first step that computes the row."""
        self._layers.encode(encoder_input)

    def forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute the step: hidden states [T, E] on the last stage, None on others, which passed them on."""
        shard = self._model.shard
        if shard.is_first_stage:
            x_TE = self._model.embed(inputs.token_ids_T)
        else:
            x_TE = self._parallel.receive_hidden(self._hidden_TE[: inputs.num_tokens])
        x_TE = self._layers.forward(x_TE, inputs.positions_T, inputs.metadata)
        if shard.is_last_stage:
            return x_TE
        self._parallel.send_hidden(x_TE)
        return None

    def logits(self, hidden_TE: torch.Tensor, tokens_S: Int64Array) -> torch.Tensor | None:
        """Logits [S, V] of chosen tokens of the step, on the last stage's rank 0."""
        if len(tokens_S) == len(hidden_TE) and np.array_equal(tokens_S, np.arange(len(tokens_S))):
            return self._model.logits(hidden_TE)
        return self._model.logits(hidden_TE[torch.from_numpy(tokens_S).to(hidden_TE.device)])


class LayerByLayer:
    """A stage's layers in turn, any step."""

    def __init__(self, model: Decoder, caches: PagedCaches, layer_done: LayerDone = nobody_waits) -> None:
        self._model = model
        self._caches = caches
        self._layer_done = layer_done

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, metadata: Sequence[GroupMetadata]) -> torch.Tensor:
        """See LayerCompute."""
        self._caches.begin(metadata)
        return self._model.forward(x_TE, self._step(positions_T))

    def _step(self, positions_T: torch.Tensor) -> Step:
        return Step(positions_T=positions_T, caches=self._caches, layer_done=self._layer_done)

    def encode(self, encoder_input: EncoderInput) -> None:
        """See LayerCompute."""
        self._caches.begin_encoding(encoder_input.slots_N)
        self._model.encode(encoder_input.token_ids_N, self._caches)
