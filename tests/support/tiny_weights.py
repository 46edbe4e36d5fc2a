"""Random weights under which a tiny model's output depends on everything the model computes.

Default initialisation makes a tiny model repeat itself, forget its states within a token or treat its sinks,
norms and expert biases as absent; a wrong cache would go unnoticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

_NORM_SPREAD = 0.3
_QK_NORM_GAIN = (0.2, 1.2)  # attention looks at few tokens, not at their mean
_BIAS_STD = 0.05
_CONV_STD = 0.4  # of depthwise taps, few per output
_ROUTER_STD = 0.3  # experts are chosen by clear margins
# time steps and decay rates such that a state fades over about 5 to 500 tokens
_TIME_STEPS = (0.02, 0.3)
_DECAY_RATES = (0.1, 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightScale:
    """Standard deviations of the matrices and the embeddings of a model."""

    matrix: float = 0.08
    embedding: float = 0.08


@torch.no_grad()
def randomise(model: torch.nn.Module, scale: WeightScale) -> None:
    """Overwrite every weight of a freshly made float32 model, in order, from torch's global generator."""
    for name, tensor in _weights(model):
        _randomise_one(name, tensor, scale)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()  # tied ones once
    # DeepSeek's bias of expert choice is a buffer
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))


def _randomise_one(name: str, tensor: torch.Tensor, scale: WeightScale) -> None:
    *_, owner, leaf = ("", *name.split("."))
    if leaf == "A_log":
        tensor.uniform_(*_DECAY_RATES).log_()
    elif leaf == "dt_bias" or (owner, leaf) == ("dt_proj", "bias"):
        steps = torch.empty_like(tensor).uniform_(*_TIME_STEPS)
        tensor.copy_(steps.expm1().log())  # the inverse of softplus
    elif leaf == "D":
        tensor.uniform_(0.5, 1.5)
    elif leaf == "sinks":
        tensor.normal_(0.0, 1.0)
    elif "conv" in owner and tensor.ndim == 3:
        tensor.normal_(0.0, _CONV_STD)
    elif owner in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        tensor.add_(torch.empty_like(tensor).uniform_(*_QK_NORM_GAIN))
    elif tensor.ndim == 1 and leaf == "weight":
        tensor.add_(torch.empty_like(tensor).uniform_(-_NORM_SPREAD, _NORM_SPREAD))  # norms begin at 0 or at 1
    elif tensor.ndim == 1:
        tensor.normal_(0.0, _BIAS_STD)
    elif "embed" in owner or owner == "shared":
        tensor.normal_(0.0, scale.embedding)
    elif owner in ("gate", "router"):
        tensor.normal_(0.0, _ROUTER_STD)
    else:
        tensor.normal_(0.0, scale.matrix)
        if tensor.ndim == 2:  # activations have a mean; it must not add the same vector to every token
            tensor.sub_(tensor.mean(dim=1, keepdim=True))
