"""N-gram lookup in plain Python, as an oracle."""

from __future__ import annotations

from blockferry.engine.wire import NO_DRAFT


def naive_lookup(tokens: list[int], *, min_ngram: int, max_ngram: int, num_drafts: int) -> list[int]:
    """What followed the last tokens where they recur; NO_DRAFT in all places where they do not."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for first in range(len(tokens) - length - 1, -1, -1):
            if tokens[first : first + length] == tokens[-length:]:
                known = list(tokens)
                for _ in range(num_drafts):
                    known.append(known[first + length + len(known) - len(tokens)])
                return known[len(tokens) :]
    return [NO_DRAFT] * num_drafts
