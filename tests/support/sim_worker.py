"""A worker without a model: checks every plan and computes tokens as a function of cache content."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from support.sim_cache import SimCache, Span
from support.sim_chain import chain, next_token
from support.sim_drafts import NO_DRAFTS, SimDrafts

from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import FinishReason, Request
from blockferry.engine.wire import StepPlan, StepResult, pack, plan_from_bytes


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
    drafts: list[int] = dataclasses.field(default_factory=list)  # of the step


class SimWorker:
    """One instance's worker. Executes plans in order and asserts that each makes sense."""

    def __init__(
        self, config: KVCacheConfig, *, max_rows: int, max_model_len: int, drafts: SimDrafts = NO_DRAFTS
    ) -> None:
        self.cache = SimCache(config, max_rows=max_rows, max_model_len=max_model_len)
        self.max_model_len = max_model_len
        self.rows: dict[int, SimRow] = {}
        self.last_step = -1
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.drafts = drafts
        self.num_verified = 0
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
        sampled = self._sample(plan, spans)
        counts = np.array([len(tokens) for tokens in sampled], np.int32)
        return StepResult(
            step_id=plan.step_id,
            token_ids=np.array([token_id for tokens in sampled for token_id in tokens], np.int32),
            num_tokens=counts if len(plan.num_drafts) else counts[:0],
            proposals=self._propose(plan),
        )

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
        drafts = _drafts_by_row(plan)
        for row, start, count in zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            state = self.rows[row]
            state.drafts = drafts[row]
            assert count >= 1
            assert state.num_computed in (-1, start), "a position computed twice or skipped"
            assert start + count <= len(state.token_ids) + len(state.drafts), "an unknown token is computed"
            assert not state.drafts or count == 1 + len(state.drafts), "drafts behind a chunk"
            assert start + count <= self.max_model_len, "a draft behind the longest sequence"
            states = np.array(chain((state.token_ids + state.drafts)[: start + count]), np.int64)
            spans.append(Span(row, start, start + count, state.num_prompt_tokens, states, len(state.drafts)))
        return spans

    def _check_writes(self, spans: list[Span]) -> None:
        """What a row writes nobody else reads in the same step, but for equal tokens of attention."""
        cache = self.cache
        writers: dict[int, tuple[int, int, int]] = {}  # by part of memory: row, group, block
        readers: dict[int, set[int]] = collections.defaultdict(set)
        for span in spans:
            for group in cache.groups:
                for block_id in cache.blocks_written(group, span):
                    me = (span.row, group, block_id)
                    for part in cache.parts(group, block_id):
                        assert writers.setdefault(part, me) == me, "two rows write one block"
                for block_id in cache.blocks_read(group, span):
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
        mine, others = (self.rows[one].token_ids + self.rows[one].drafts for one in (row, other))
        return mine[:stop] == others[:stop]

    def _sample(self, plan: StepPlan, spans: list[Span]) -> list[list[int]]:
        """The tokens of each sampling row: drafts that are what the chain yields, and one more."""
        sampled = []
        for span, sample in zip(spans, plan.sample.tolist()):
            state = self.rows[span.row]
            num_drafts = len(state.drafts)
            state.num_computed = span.stop
            if sample:
                assert span.stop == len(state.token_ids) + num_drafts, "sampled before the last known token"
                tokens = [next_token(int(number)) for number in span.states[span.stop - num_drafts - 1 :]]
                is_right = [draft == token_id for draft, token_id in zip(state.drafts, tokens)]
                num_accepted = is_right.index(False) if False in is_right else num_drafts
                sampled.append(tokens[: num_accepted + 1])
                state.token_ids += sampled[-1]
                state.num_computed = len(state.token_ids) - 1
                self.cache.settle(span, num_accepted)
            else:
                self.cache.settle(span, 0)
                assert not num_drafts, "drafts of a row that is not sampled"
            self.num_verified += num_drafts
            self.num_computed_tokens += span.stop - span.start
        return sampled

    def _propose(self, plan: StepPlan) -> np.ndarray:
        assert 0 <= plan.num_proposals <= self.drafts.num_tokens, plan.num_proposals
        rows = plan.rows[plan.sample].tolist()
        proposals = [self.drafts.propose(chain(self.rows[row].token_ids)[-1], plan.num_proposals) for row in rows]
        return np.array(proposals, np.int32).reshape(len(rows), plan.num_proposals)


def _drafts_by_row(plan: StepPlan) -> dict[int, list[int]]:
    """Tokens that a plan wants verified."""
    if not len(plan.num_drafts):
        assert not len(plan.draft_token_ids), "drafts of nobody"
        return {row: [] for row in plan.rows.tolist()}
    assert len(plan.num_drafts) == len(plan.rows)
    assert plan.num_drafts.sum() == len(plan.draft_token_ids) > 0
    drafts = np.split(plan.draft_token_ids, np.cumsum(plan.num_drafts)[:-1])
    return {row: mine.tolist() for row, mine in zip(plan.rows.tolist(), drafts)}
