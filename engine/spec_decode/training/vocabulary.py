"""Which tokens a head may draft: the ones that the model writes most, as the head's size decides its cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blockferry.engine.spec_decode.training.corpus import Writing


def draft_vocabulary(writings: Sequence[Writing], *, vocab_size: int, num_tokens: int) -> torch.Tensor:
    """int32 [num_tokens], ascending: by how often the model wrote them, then by their id.

    Tokenizers that merge pairs number tokens by how frequent they are in general, so that low ids fill up the rest.
    """
    written = np.concatenate([one.token_ids[one.num_prompt_tokens :] for one in writings])
    counts_V = np.bincount(written, minlength=vocab_size)
    order_V = np.lexsort((np.arange(vocab_size), -counts_V))
    return torch.from_numpy(np.sort(order_V[:num_tokens]).astype(np.int32))
