"""Logits of one whole prompt by one forward pass of our model without pages, on one rank or on several in threads.

Legend: T tokens, N tokens of an encoder's input, H query heads, K KV heads, D head dim, R latent vector, V vocabulary,
S tokens that want logits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from support.state_oracles import make_step

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.kv.model_layers import LayerOptions, layers_of
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.models.config import read_header
from blockferry.engine.models.layers import Communicator
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement

MEETING_TIMEOUT_S = 60.0


class DenseCaches:
    """Caches of one prompt that is computed at once: no keys are kept, and states are those of one row."""

    def __init__(self, states: Mapping[int, LayerStates] | None = None) -> None:
        """states: of each recurrent layer, by its number."""
        self._states = states or {}
        self._cross: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values of the encoder's input

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """See Caches."""
        num_groups = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(num_groups, 1) for x in (k_TKD, v_TKD))
        scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD) * rule.scale
        scores_HTT = scores_HTT.masked_fill(~_seen(len(q_THD), rule), -torch.inf)
        if rule.sinks_H is not None:  # one key more, whose value is zero
            scores_HTT = torch.cat((scores_HTT, rule.sinks_H[:, None, None].expand(-1, len(q_THD), 1)), dim=-1)
        weights_HTT = scores_HTT.softmax(dim=-1)[..., : len(q_THD)]
        return torch.einsum("hts,shd->thd", weights_HTT, v_THD)

    def attend_latent(
        self, layer: int, q_THR: torch.Tensor, latent_TR: torch.Tensor, rule: AttentionRule, *, value_dim: int
    ) -> torch.Tensor:
        """See Caches: one key head that all query heads read."""
        return self.attend(layer, q_THR, latent_TR[:, None], latent_TR[:, None, :value_dim], rule)

    def states(self, layer: int) -> LayerStates:
        """See Caches."""
        return self._states[layer]

    def write_cross(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """See Caches."""
        self._cross[layer] = k_NKD, v_NKD

    def attend_cross(self, layer: int, q_THD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """See Caches: of as many key heads as query heads."""
        k_NHD, v_NHD = self._cross[layer]
        weights_HTN = (torch.einsum("thd,nhd->htn", q_THD, k_NHD) * rule.scale).softmax(dim=-1)
        return torch.einsum("htn,nhd->thd", weights_HTN, v_NHD)


def fresh_states(path: Path, num_tokens: int, *, tp_size: int = 1) -> dict[int, LayerStates]:
    """States of one row that starts, as one rank holds them, in the blocks that a plan would give it."""
    model = layers_of(read_header(path).values, LayerOptions(tp_size=tp_size))
    return {
        number: LayerStates(
            tensors=tuple(torch.full((1, *shape), torch.nan) for shape in spec.shapes),
            metadata=make_step([num_tokens], fresh=(0,)),
        )
        for number, spec in zip(model.layer_numbers, model.layers, strict=True)
        if isinstance(spec, MambaSpec)
    }


class ThreadCommunicator:
    """Ranks that are threads of this process; each holds one of these, made by `ranks`."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[torch.Tensor]) -> None:
        self.rank = rank
        self.size = len(board)
        self._barrier = barrier
        self._board = board

    @classmethod
    def ranks(cls, size: int) -> list[ThreadCommunicator]:
        """All ranks of one stage."""
        barrier, board = threading.Barrier(size), [torch.empty(0)] * size
        return [cls(rank, barrier, board) for rank in range(size)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Communicator."""
        return torch.stack(self._meet(x)).sum(dim=0)

    def gather_columns(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """See Communicator."""
        parts = self._meet(x_SV)
        return None if self.rank else torch.cat(parts, dim=-1)

    def _meet(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x.clone()
        self._barrier.wait(MEETING_TIMEOUT_S)
        parts = list(self._board)
        self._barrier.wait(MEETING_TIMEOUT_S)
        return parts


def dense_logits(
    path: Path, token_ids: Sequence[int], *, tp_size: int = 1, encoder_ids: Sequence[int] = ()
) -> torch.Tensor:
    """float32 [T, V] of one sequence; of an encoder-decoder the decoder's, encoder_ids being its encoder's input."""
    communicators = ThreadCommunicator.ranks(tp_size)
    with ThreadPoolExecutor(tp_size) as pool:
        ranks = [
            pool.submit(_rank_logits, path, token_ids, encoder_ids, communicator) for communicator in communicators
        ]
        answers = [rank.result() for rank in ranks]
    assert answers[0] is not None
    return answers[0]


@torch.inference_mode()
def _rank_logits(
    path: Path, token_ids: Sequence[int], encoder_ids: Sequence[int], communicator: Communicator
) -> torch.Tensor | None:
    model = load_model(
        path,
        RankPlace(tp_rank=communicator.rank, tp_size=communicator.size),
        placement=Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=len(token_ids)),
        parts=ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=communicator),
    )
    caches = DenseCaches(fresh_states(path, len(token_ids), tp_size=communicator.size))
    if encoder_ids:
        model.encode(torch.tensor(list(encoder_ids), dtype=torch.int32), caches)
    hidden_TE = model.embed(torch.tensor(list(token_ids), dtype=torch.int32))
    hidden_TE = model.forward(hidden_TE, Step(positions_T=torch.arange(len(token_ids)), caches=caches))
    return model.logits(hidden_TE)


def _seen(num_tokens: int, rule: AttentionRule) -> torch.Tensor:
    """bool [T, T]: which keys (columns) a query sees."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    seen = key <= query
    if rule.window is not None:
        seen &= key > query - rule.window
    if rule.chunk is not None:
        seen &= key >= query - query % rule.chunk
    return seen
