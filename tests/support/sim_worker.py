"""A worker without a model: checks every plan and computes tokens as a function of cache content."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from support.sim_cache import SimCache, Span

from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import FinishReason, Request
from blockferry.engine.wire import StepPlan, StepResult, pack, plan_from_bytes

VOCAB_SIZE = 23
_MASK = (1 << 61) - 1


def fold(state: int, token_id: int) -> int:
    """The number of the slot after `state` that holds token_id."""
    return ((state * 1_000_003 + int(token_id) + 1) * 2_654_435_761 + 12_345) & _MASK | 8


def chain(token_ids) -> list[int]:
    """Slot numbers of a sequence."""
    states, state = [], 1
    for token_id in token_ids:
        state = fold(state, token_id)
        states.append(state)
    return states


def next_token(state: int) -> int:
    """The token that follows a slot number."""
    return (state >> 13) % VOCAB_SIZE


def reference(request: Request, *, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """What any schedule must produce: output tokens, reason, stop token."""
    sampling = request.sampling
    tokens = request.prompt_token_ids.tolist()
    limit = min(len(tokens) + sampling.max_tokens, max_model_len)
    output: list[int] = []
    while len(tokens) < limit:
        token_id = next_token(chain(tokens)[-1])
        tokens.append(token_id)
        output.append(token_id)
        if token_id in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP, token_id
    return output, FinishReason.LENGTH, None


@dataclasses.dataclass(slots=True)
class SimRow:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int = -1  # not known yet


class SimWorker:
    """One instance's worker. Executes plans in order and asserts that each makes sense."""

    def __init__(self, config: KVCacheConfig, *, max_rows: int, max_model_len: int) -> None:
        self.cache = SimCache(config, max_rows=max_rows, max_model_len=max_model_len)
        self.rows: dict[int, SimRow] = {}
        self.last_step = -1
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.has_states = any(self.cache.is_state)

    def execute(self, plan: StepPlan) -> StepResult:
        plan = plan_from_bytes(pack(plan))  # as the wire does
        assert plan.step_id == self.last_step + 1, "plans arrive in order"
        self.last_step = plan.step_id
        self._apply(plan)
        assert len(plan.rows) or len(plan.zero) or len(plan.copies), "an empty step"
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one plan"
        spans = self._spans(plan)
        self._check_writes(spans)
        for verb in (self.cache.read_states, self.cache.write, self.cache.read):
            for span in spans:
                verb(span)
        return StepResult(step_id=plan.step_id, token_ids=self._sample(plan, spans))

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows.tolist():
            self.rows.pop(row, None)
            self.cache.forget(row)
        for new_row in plan.new_rows:
            assert new_row.row not in self.rows, "a row started twice"
            assert new_row.sampling.seed is not None
            self.rows[new_row.row] = SimRow(new_row.token_ids.tolist(), new_row.num_prompt_tokens)
        self.cache.apply(plan.deltas)
        self.cache.zero(plan.zero)
        self.cache.copy(plan.copies, plan.zero)
        self.num_copies += len(plan.copies)

    def _spans(self, plan: StepPlan) -> list[Span]:
        spans = []
        for row, start, count in zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            state = self.rows[row]
            assert count >= 1
            assert state.num_computed in (-1, start), "a position computed twice or skipped"
            assert start + count <= len(state.token_ids), "an unknown token is computed"
            states = np.array(chain(state.token_ids[: start + count]), np.int64)
            spans.append(Span(row, start, start + count, state.num_prompt_tokens, states))
        return spans

    def _check_writes(self, spans: list[Span]) -> None:
        """What a row writes nobody else reads in the same step, but for equal tokens of attention."""
        cache = self.cache
        writers: dict[int, tuple[int, int, int]] = {}  # by part of memory: row, group, block
        readers: dict[int, set[int]] = collections.defaultdict(set)
        for span in spans:
            for group in cache.groups:
                for block_id in set(cache.blocks(group, span.row, cache.positions_written(group, span)).tolist()):
                    me = (span.row, group, block_id)
                    for part in cache.parts(group, block_id):
                        assert writers.setdefault(part, me) == me, "two rows write one block"
                for block_id in set(cache.blocks(group, span.row, cache.positions_read(group, span)).tolist()):
                    for part in cache.parts(group, block_id):
                        readers[part].add(span.row)
        for part, (row, group, block_id) in writers.items():
            for other in readers[part] - {row}:
                assert not cache.is_state[group], "a row reads a state that another one writes"
                assert self._is_same_prefix(row, other, group, block_id), "a row writes a block that another one uses"

    def _is_same_prefix(self, row: int, other: int, group: int, block_id: int) -> bool:
        """True when both rows mean the same tokens by the block: a prefix hit within one step."""
        column = self.cache.tables[group].row(row).tolist().index(block_id)
        stop = (column + 1) * self.cache.sizes[group]
        return self.rows[row].token_ids[:stop] == self.rows[other].token_ids[:stop]

    def _sample(self, plan: StepPlan, spans: list[Span]):
        sampled = []
        for span, sample in zip(spans, plan.sample.tolist()):
            state = self.rows[span.row]
            if sample:
                assert span.stop == len(state.token_ids), "sampled before the last known token"
                sampled.append(next_token(int(span.states[-1])))
                state.token_ids.append(sampled[-1])
            state.num_computed = span.stop
            self.num_computed_tokens += span.stop - span.start
        return np.array(sampled, np.int32)
