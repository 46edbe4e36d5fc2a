"""Log probabilities of sampled and of prompt tokens, from the model's own logits (before any edit, as vLLM).

Owns no state. Rows that ask for them are rare, so this loops over them.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from blockferry.engine.request import Int32Array, TokenLogprobs


def token_logprobs(logits_SV: torch.Tensor, token_ids_S: Int32Array, num_top_S: Int32Array) -> list[TokenLogprobs]:
    """One entry per row: the token itself, then the best num_top tokens, best first."""
    logprobs_SV = logits_SV.float().log_softmax(dim=-1)
    tokens_S1 = torch.from_numpy(token_ids_S.astype(np.int64))[:, None].to(logprobs_SV.device)
    own_S1 = logprobs_SV.gather(1, tokens_S1)
    rank_S = (logprobs_SV > own_S1).sum(-1).add_(1).cpu().numpy()
    top = logprobs_SV.topk(min(int(num_top_S.max()), logprobs_SV.shape[1]), dim=-1)
    ids = torch.cat((tokens_S1, top.indices), dim=-1).int().cpu().numpy()
    values = torch.cat((own_S1, top.values), dim=-1).cpu().numpy()
    return [
        TokenLogprobs(token_ids=ids[i, : 1 + num_top], logprobs=values[i, : 1 + num_top], rank=int(rank_S[i]))
        for i, num_top in enumerate(num_top_S.tolist())
    ]
