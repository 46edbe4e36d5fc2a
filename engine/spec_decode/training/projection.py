"""Where a module starts: its projection as the best linear guess of the next hidden state, in closed form.

    h_i+1 ~ A [enorm(E(t_i+1)); hnorm(h_i)]      least squares over the corpus, with a little ridge

Seconds of work that drafts as well as hundreds of training steps do. Norms start with gains that give every feature
the same size: hidden states have a few that are ten times the others, and one learning rate has to suit all. The layer
adds nothing yet: its outputs are multiplied by zero. It attends as the model's last layer does; its feed-forward part
is drawn, as on SmolLM2 the output of a copy would be 60 times what it is added to.

Legend: N tokens, E hidden, F two E.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from blockferry.engine.spec_decode.training.base import BaseModel
from blockferry.engine.spec_decode.training.examples import Examples

RIDGE = 1e-3  # of the mean square of an input
SMALLEST_SIZE = 0.05  # of a feature that a norm's gain makes up for
SMALLEST_GAIN = 0.25  # of the model's last norm that is undone
MAX_TOKENS = 1 << 17
PIECE = 4096


def initial_weights(base: BaseModel, examples: Examples, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """By HEAD_NAMES, float32."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str) -> torch.Tensor:
        shape = base.last_layer[name].shape
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])

    last = base.last_layer
    ends = _Ends.of(base, examples)
    projection_EF, guessed_size_E = _best_projection(base, examples, ends)
    return {
        **{name: tensor.clone() for name, tensor in last.items()},
        "self_attn.o_proj.weight": torch.zeros_like(last["self_attn.o_proj.weight"]),
        "post_attention_layernorm.weight": 1.0 / guessed_size_E,
        "mlp.gate_proj.weight": drawn("mlp.gate_proj.weight"),
        "mlp.up_proj.weight": drawn("mlp.up_proj.weight"),
        "mlp.down_proj.weight": torch.zeros_like(last["mlp.down_proj.weight"]),
        "enorm.weight": ends.embedding_gain_E,
        "hnorm.weight": ends.hidden_gain_E,
        "eh_proj.weight": projection_EF,
        "shared_head.norm.weight": base.norm_E.clone(),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """What a module reads, normed."""

    base: BaseModel
    examples: Examples
    embedding_gain_E: torch.Tensor
    hidden_gain_E: torch.Tensor

    @classmethod
    def of(cls, base: BaseModel, examples: Examples) -> _Ends:
        """With gains by which features are 1 in the mean square over some thousand tokens."""
        ones_E = torch.ones(base.header.hidden_size)
        plain = cls(base=base, examples=examples, embedding_gain_E=ones_E, hidden_gain_E=ones_E)
        size_F = plain.inputs(_places(examples)[0]).square().mean(dim=0).sqrt().clamp(min=SMALLEST_SIZE)
        embedding_size_E, hidden_size_E = size_F.chunk(2)
        return dataclasses.replace(plain, embedding_gain_E=1.0 / embedding_size_E, hidden_gain_E=1.0 / hidden_size_E)

    def inputs(self, places_N: torch.Tensor) -> torch.Tensor:
        """float32 [N, F] of the projection."""
        eps, examples = self.base.header.norm_eps, self.examples
        embedded_NE = self.base.embedding_VE[examples.token_ids_N[places_N + 1]].float()
        parts = (
            _normed(embedded_NE, eps) * self.embedding_gain_E,
            _normed(examples.hidden_NE[places_N].float(), eps) * self.hidden_gain_E,
        )
        return torch.cat(parts, dim=1)


def _best_projection(base: BaseModel, examples: Examples, ends: _Ends) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, F], to what the last norm's gain makes the next hidden state of; and how large what it makes is [E]."""
    # undoes that gain, which hidden states have been through
    gain_E = base.norm_E.sign() / base.norm_E.abs().clamp(min=SMALLEST_GAIN)
    size = base.header.hidden_size
    squares_FF, products_FE = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    places = _places(examples)
    for places_N in places:
        inputs_NF = ends.inputs(places_N)
        squares_FF += inputs_NF.T @ inputs_NF
        products_FE += inputs_NF.T @ (examples.hidden_NE[places_N + 1].float() * gain_E)
    ridge = RIDGE * squares_FF.diagonal().mean()
    projection_FE = torch.linalg.solve(squares_FF + ridge * torch.eye(2 * size), products_FE)
    guessed_NE = _normed(ends.inputs(places[0]) @ projection_FE, base.header.norm_eps)
    size_E = guessed_NE.square().mean(dim=0).sqrt().clamp(min=SMALLEST_SIZE)
    return projection_FE.T.contiguous(), size_E


def _places(examples: Examples) -> list[torch.Tensor]:
    """Places of the corpus whose next token belongs to the same sequence, some thousand at a time."""
    spans = [torch.arange(window.start, window.start + window.length - 1) for window in examples.windows]
    return list(torch.split(torch.cat(spans)[:MAX_TOKENS], PIECE))


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
