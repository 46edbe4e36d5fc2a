"""How far drafts are from what the model would say: cross-entropy over the drafted vocabulary, in pieces.

Logits of many tokens over thousands of words are the largest tensors of training by far, and the head that makes them
does not learn: so loss and gradient of a piece of tokens are computed together and its logits forgotten.

Legend: N tokens, E hidden, V drafted vocabulary, K targets of a token.
"""

from __future__ import annotations

from typing import Any

import torch

PIECE = 512


class DraftLoss(torch.autograd.Function):
    """Sum over tokens and targets of -p log q, q being the softmax of hidden @ head^T.

    A token's p need not add up to 1: what the vocabulary lacks is left out, and tokens may weigh more or less.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: torch.Tensor, head_VE: torch.Tensor, ids_NK: torch.Tensor, probs_NK: torch.Tensor
    ) -> torch.Tensor:
        """ids: int64 rows of the head; where probs are 0, any."""
        total = torch.zeros((), dtype=torch.float32)
        gradients = []
        pieces = (torch.split(part, PIECE) for part in (hidden_NE, ids_NK, probs_NK))
        for hidden, ids, probs in zip(*pieces, strict=True):
            q = (hidden @ head_VE.T).softmax(dim=-1)
            total -= (probs * q.gather(1, ids).float().clamp(min=1e-30).log()).sum()
            q *= probs.sum(dim=1, keepdim=True).to(q.dtype)
            q.scatter_add_(1, ids, -probs.to(q.dtype))
            gradients.append(q @ head_VE)
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Of hidden alone."""
        (gradient_NE,) = ctx.saved_tensors
        return gradient_NE * grad_outputs[0].to(gradient_NE.dtype), None, None, None


def draft_loss(
    hidden_NE: torch.Tensor, head_VE: torch.Tensor, ids_NK: torch.Tensor, probs_NK: torch.Tensor
) -> torch.Tensor:
    """See DraftLoss: a float32 scalar."""
    loss: torch.Tensor = DraftLoss.apply(hidden_NE, head_VE, ids_NK, probs_NK)  # type: ignore[no-untyped-call]  # torch
    return loss
