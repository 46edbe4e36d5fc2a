"""The tokens of a step's result: checked against what was planned, cut at stop ids and appended to their rows.

Mutates the RowTable, on behalf of update.py; ends nothing and caches nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.batch import RowView
from blockferry.engine.wire import NO_DRAFT, StepResult


class Drawn(NamedTuple):
    """What a step drew for some rows, [R]. A NamedTuple, as it is made in every step."""

    view: RowView
    token_ids: Int32Array  # [sum(counts)], row by row
    counts: Int32Array  # accepted drafts, and one; empty: one each
    num_drafts: Int32Array  # that were verified of each; empty: none of any
    proposals: NDArray[np.int32]  # [R, K], NO_DRAFT where none, and after it; or without elements

    def keep(self, chosen: BoolArray) -> Drawn:
        """The same for the chosen rows."""
        counts, num_drafts, proposals = self.counts, self.num_drafts, self.proposals
        return Drawn(
            view=self.view.keep(chosen),
            token_ids=self.token_ids[np.repeat(chosen, counts) if len(counts) else chosen],
            counts=counts[chosen] if len(counts) else counts,
            num_drafts=num_drafts[chosen] if len(num_drafts) else num_drafts,
            proposals=proposals[chosen] if proposals.size else proposals,
        )


class NewTokens(NamedTuple):
    """What some rows got: T tokens, row by row; all other arrays are of the rows, [R]."""

    view: RowView
    handles: Int64Array  # [T]
    token_ids: Int32Array  # [T]
    num_tokens: Int32Array  # that the row has by now
    is_stop: BoolArray  # its last token is one of its stop ids


def append(rows: RowTable, drawn: Drawn) -> NewTokens:
    """Append what was drawn to its rows, up to each row's first stop id."""
    view, counts = drawn.view, drawn.counts
    if len(counts) or len(drawn.num_drafts):
        return _append_verified(rows, view, drawn.token_ids, counts if len(counts) else np.ones_like(drawn.num_drafts))
    num_tokens = rows.append(view.rows, drawn.token_ids)
    return NewTokens(
        view=view,
        handles=view.handles,
        token_ids=drawn.token_ids,
        num_tokens=num_tokens,
        is_stop=view.find_stops(drawn.token_ids, num_tokens),
    )


def _append_verified(rows: RowTable, view: RowView, token_ids: Int32Array, counts: Int32Array) -> NewTokens:
    """Append counts [R] tokens to each row.

    Drafts that did not hold were computed for nothing: the rows' computed counts go back to all but their last token.
    """
    places = view.rows.astype(np.intp)  # the type that indexing converts to, once for all of it
    index = np.arange(len(counts)).repeat(counts)  # of each token's row
    is_stop = np.zeros(len(counts), np.bool_)
    stops = view.find_stop_ids(token_ids, index)
    if len(stops):
        place = _places(counts, index)
        lengths = rows.num_tokens.take(places.take(index[stops])) + place[stops] + np.int32(1)
        stops = stops[lengths >= view.min_tokens.take(index[stops])]
        stopping, first = np.unique(index[stops], return_index=True)
        is_stop[stopping] = True
        counts = counts.copy()
        counts[stopping] = place[stops[first]] + 1
        is_kept = place < counts.take(index)
        token_ids, index = token_ids[is_kept], index[is_kept]
    num_tokens = rows.append_several(places, token_ids, counts, index)
    rows.num_computed_tokens[places] = num_tokens - np.int32(1)
    return NewTokens(
        view=view,
        handles=view.handles.take(index),
        token_ids=token_ids,
        num_tokens=num_tokens,
        is_stop=is_stop,
    )


def _places(counts: Int32Array, index: NDArray[np.intp]) -> Int32Array:
    """Which of its row's tokens each token is."""
    first = np.cumsum(counts, dtype=np.int32) - counts
    places: Int32Array = np.arange(len(index), dtype=np.int32) - first.take(index)
    return places


def describe_mismatch(result: StepResult, *, num_sampled: int, num_drafts: Int32Array, num_proposals: int) -> str:
    """What is wrong with a result of a step that samples num_sampled rows; empty: nothing.

    num_drafts: verified of each of those rows, or empty; num_proposals: asked for.
    """
    if not len(result.num_tokens):
        if len(result.token_ids) != num_sampled:
            return (
                f"samples {num_sampled} rows, but its result has {len(result.token_ids)} tokens; return one token per "
                "sampling row of the plan"
            )
    else:
        trouble = _describe_counts(result, num_sampled, num_drafts)
        if trouble:
            return trouble
    return _describe_proposals(result, num_sampled, num_proposals)


def _describe_counts(result: StepResult, num_sampled: int, num_drafts: Int32Array) -> str:
    counts = result.num_tokens
    if len(counts) != num_sampled:
        return f"samples {num_sampled} rows, but its result counts the tokens of {len(counts)}; count each row's"
    if not len(num_drafts):
        num_drafts = np.zeros(num_sampled, np.int32)
    is_wrong = (counts - np.int32(1)).astype(np.uint32) > num_drafts  # no token at all is very many accepted ones
    if np.count_nonzero(is_wrong):
        place = int(is_wrong.argmax())
        return (
            f"has {int(counts[place])} tokens for sampling row {place}, which may have 1 to {num_drafts[place] + 1}; "
            "return its accepted drafts and one token"
        )
    if int(np.add.reduce(counts)) != len(result.token_ids):
        return f"has {len(result.token_ids)} tokens, but counts {int(counts.sum())}; return as many as are counted"
    return ""


def _describe_proposals(result: StepResult, num_sampled: int, num_proposals: int) -> str:
    proposals = result.proposals
    if not proposals.size:
        return ""
    if proposals.shape != (num_sampled, num_proposals):
        return (
            f"asks for proposals of shape {(num_sampled, num_proposals)}, but its result has {proposals.shape}; return "
            "a row of num_proposals drafts for each sampling row, or none"
        )
    smallest = int(proposals.min())
    if smallest > NO_DRAFT:
        return ""
    if smallest < NO_DRAFT:
        return f"got the draft {smallest}; use token ids, or {NO_DRAFT} where there is no draft"
    is_draft = proposals != NO_DRAFT
    if (is_draft[:, 1:] & ~is_draft[:, :-1]).any():
        return f"got a draft after {NO_DRAFT}, which ends a row's drafts; move its drafts to the front"
    return ""
