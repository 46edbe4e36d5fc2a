"""Modules that predict one token each beyond the next one, on top of a model whose embedding and head they share.

    token i+1 -- embedding -- norm --+
                                     +-- projection -- decoder layer --+-- last norm -- head -- draft of token i+2
    hidden i --------------- norm ---+                                 |
                                                                       +-- (last norm) -- hidden i of the next module

Multi-token prediction of DeepSeek-V3 (arXiv:2412.19437, section 2.2). hidden i is the model's own behind its last norm.
A module stands at position i with keys and values of its own; the last module goes on from its own output. What is
handed on differs: DeepSeek-V3 (transformers' MtpModel) and Qwen3-Next (vLLM's qwen3_next_mtp) hand on what the last
norm made of it, heads of the Llama family what went into that norm.

Owns the modules' weights; caches are behind Step. How modules are read, mtp_loader.py says.

Legend: T tokens, S tokens that want a draft, E hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from blockferry.engine.models.decoder import Layer
from blockferry.engine.models.draft_vocabulary import BestTokens, DraftVocabulary
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.step import Step
from blockferry.engine.models.tape_source import TapeSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """A module's decoder layer as its family reads it."""

    layer: Layer
    source: TapeSource | None = None  # of this layer alone, where a whole pass may run as one call (cpu_draft.py)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MtpModule:
    """Weights of one module on one rank."""

    number: int  # of its decoder layer among all layers
    embedding_norm_E: torch.Tensor
    hidden_norm_E: torch.Tensor
    projection: Linear  # 2 E -> E: embedding, then hidden state
    draft_layer: DraftLayer
    last_norm_E: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """What a module made of its tokens."""

    handed_on_TE: torch.Tensor  # for the next module, or for itself at the next position
    normed_TE: torch.Tensor  # for the head


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What modules share with their model."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # token ids [T] -> [T, E]
    normed: Callable[[torch.Tensor], torch.Tensor]  # the model's last norm
    vocabulary: DraftVocabulary
    ops: LayerOps
    norm_eps: float


class Drafter:
    """One rank's modules. The worker's model thread calls it, on all ranks of the last stage alike."""

    def __init__(self, modules: Sequence[MtpModule], shared: SharedParts, *, hands_on_normed: bool) -> None:
        self.modules = modules
        self._shared = shared
        self.hands_on_normed = hands_on_normed

    def normed(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Hidden i of the first module, from what the model's layers made."""
        return self._shared.normed(hidden_TE)

    def forward(self, depth: int, token_ids_T: torch.Tensor, hidden_TE: torch.Tensor, step: Step) -> DraftOutput:
        """Run module `depth`, from 0 on, over tokens i+1+depth at positions i of the step. hidden keeps its values."""
        module = self.modules[depth]
        embedded_TE, _ = self._norm(self.embed(token_ids_T), None, module.embedding_norm_E)
        hidden_TE, _ = self._norm(hidden_TE, None, module.hidden_norm_E)
        x_TE = module.projection(torch.cat((embedded_TE, hidden_TE), dim=-1))
        x_TE, residual_TE = module.draft_layer.layer.forward(x_TE, None, step)
        normed_TE, x_TE = self._norm(x_TE, residual_TE, module.last_norm_E)
        return DraftOutput(handed_on_TE=normed_TE if self.hands_on_normed else x_TE, normed_TE=normed_TE)

    def best_tokens(self, normed_SE: torch.Tensor) -> BestTokens:
        """The most likely tokens of the draft vocabulary; every rank of the stage must ask."""
        return self._shared.vocabulary.best(normed_SE)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """What a module reads of tokens, [T, E]."""
        return self._shared.embed(token_ids_T)

    def _norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._shared.ops.add_rms_norm(x_TE, residual_TE, weight_E, self._shared.norm_eps)
