"""What the model thinks at every position of the corpus: hidden states after its last norm, and its next tokens.

    WORK/states/00007.safetensors     hidden [N, E] bfloat16, top_ids [N, K] int32, top_probs [N, K] bfloat16

N counts the tokens of a part one sequence after the other. Sequences are computed side by side, each attending to
itself alone.

Legend: N tokens of a part, T tokens computed at once, H query heads, K KV heads or targets, D head dim, E hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch.nn import functional

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.config import Device
from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.weights import Placement
from blockferry.engine.spec_decode.training.base import BaseModel
from blockferry.engine.spec_decode.training.corpus import Writing
from blockferry.engine.spec_decode.training.files import write_bytes
from blockferry.engine.worker.backends import layer_ops, state_ops
from blockferry.engine.worker.parallel import LoneCommunicator

NUM_TARGETS = 16
TOKENS_AT_ONCE = 1024
LOGITS_AT_ONCE = 128  # of so many tokens they stay in a cache, and in memory that is not new


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Of N tokens."""

    hidden_NE: torch.Tensor  # bfloat16, after the model's last norm
    top_ids_NK: torch.Tensor  # int32: the most probable next tokens, most probable first
    top_probs_NK: torch.Tensor  # bfloat16: add up to 1, as if there were no others

    def save(self, path: Path) -> None:
        """Write one part."""
        tensors = {"hidden": self.hidden_NE, "top_ids": self.top_ids_NK, "top_probs": self.top_probs_NK}
        write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    @classmethod
    def load(cls, path: Path) -> States:
        """Read one part."""
        tensors = load_file(path)
        return cls(hidden_NE=tensors["hidden"], top_ids_NK=tensors["top_ids"], top_probs_NK=tensors["top_probs"])


class SideBySide:
    """Caches of whole sequences computed at once: nothing is kept, each attends to its own tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """See Caches."""
        del layer
        parts = [torch.split(part, self._lengths) for part in (q_THD, k_TKD, v_TKD)]
        return torch.cat([_causal(q_THD, k_TKD, v_TKD, rule) for q_THD, k_TKD, v_TKD in zip(*parts, strict=True)])

    def attend_latent(self, layer: int, *_: Any, **__: Any) -> torch.Tensor:
        """Never: a dense model's layers keep keys and values."""
        raise AssertionError(f"layer {layer} keeps a latent")

    def states(self, layer: int) -> LayerStates:
        """Never, likewise."""
        raise AssertionError(f"layer {layer} is recurrent")

    def write_cross(self, layer: int, *_: Any) -> None:
        """Never, likewise."""
        raise AssertionError(f"layer {layer} has an encoder")

    def attend_cross(self, layer: int, *_: Any) -> torch.Tensor:
        """Never, likewise."""
        raise AssertionError(f"layer {layer} has an encoder")


def _causal(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    q_HTD, k_KTD, v_KTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    out = functional.scaled_dot_product_attention(
        q_HTD, k_KTD, v_KTD, is_causal=True, scale=rule.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class StateReader:
    """Computes states. One thread calls it."""

    def __init__(self, base: BaseModel, *, max_len: int) -> None:
        """Reads the whole model, in bfloat16."""
        self._base = base
        parts = ModelParts(ops=layer_ops(Device.CPU), state_ops=state_ops(Device.CPU), communicator=LoneCommunicator())
        placement = Placement(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=max_len)
        self._model: Decoder = load_model(base.path, RankPlace(), placement=placement, parts=parts)

    @torch.inference_mode()
    def read(self, writings: Sequence[Writing], tick: Callable[[int], None]) -> States:
        """States of all tokens; tick is told how many more are done."""
        parts = []
        for several in _batches(writings):
            parts.append(self._step(several))
            tick(len(parts[-1].hidden_NE))
        return States(
            hidden_NE=torch.cat([part.hidden_NE for part in parts]),
            top_ids_NK=torch.cat([part.top_ids_NK for part in parts]),
            top_probs_NK=torch.cat([part.top_probs_NK for part in parts]),
        )

    def _step(self, writings: Sequence[Writing]) -> States:
        lengths = [len(one.token_ids) for one in writings]
        token_ids_T = torch.cat([torch.from_numpy(one.token_ids) for one in writings])
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        step = Step(positions_T=positions_T, caches=SideBySide(lengths))
        x_TE = self._model.forward(self._model.embed(token_ids_T), step)
        pieces = [self._targets(piece) for piece in torch.split(x_TE, LOGITS_AT_ONCE)]
        return States(
            hidden_NE=normed(x_TE, self._base.norm_E, self._base.header.norm_eps),
            top_ids_NK=torch.cat([top_ids for top_ids, _ in pieces]),
            top_probs_NK=torch.cat([top_probs for _, top_probs in pieces]),
        )

    def _targets(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable next tokens and their probabilities."""
        logits_TV = self._model.logits(x_TE.clone())
        assert logits_TV is not None, "one rank has the logits"
        top_TK, top_ids_TK = largest(logits_TV, NUM_TARGETS)
        return top_ids_TK.int(), top_TK.float().softmax(dim=-1).bfloat16()


def largest(x_TV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch.topk of the last dim, in half the time: only stretches whose maximum is among the largest are sorted."""
    stretch = next((size for size in (256, 128, 64) if x_TV.shape[1] % size == 0), x_TV.shape[1])
    pieces_TPS = torch.unflatten(x_TV, 1, (-1, stretch))
    best_TK = pieces_TPS.amax(dim=-1).topk(min(count, pieces_TPS.shape[1]), dim=-1).indices
    candidates = pieces_TPS.gather(1, best_TK[..., None].expand(-1, -1, stretch)).flatten(1)
    top_TK, places_TK = candidates.topk(count, dim=-1)
    return top_TK, best_TK.gather(1, places_TK // stretch) * stretch + places_TK % stretch


def normed(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, computed in float32, in x's dtype."""
    y_TE = x_TE.float()
    y_TE = y_TE * torch.rsqrt(y_TE.square().mean(dim=-1, keepdim=True) + eps)
    return (y_TE.to(x_TE.dtype) * weight_E.to(x_TE.dtype)).to(x_TE.dtype)


def _batches(writings: Sequence[Writing]) -> Iterator[list[Writing]]:
    """Neighbours of about TOKENS_AT_ONCE tokens together."""
    several: list[Writing] = []
    num_tokens = 0
    for one in writings:
        if several and num_tokens + len(one.token_ids) > TOKENS_AT_ONCE:
            yield several
            several, num_tokens = [], 0
        several.append(one)
        num_tokens += len(one.token_ids)
    if several:
        yield several
