"""What a simulated worker keeps: pages of numbers that stand for keys, values and states, and who may read them.

A slot of attention holds the chain number of its position, a page of state that of the last position it covers. Both
carry the group that wrote them, as pages move between groups. Every read is checked against the tokens of the row that
reads, so that a wrong hit, a missing copy, a block reused too early or a stale table entry is found where it happens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from blockferry.connectors.base import TransferPart
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.reach import ChunkReach, FullReach, RetainedPromptReach, WindowReach
from blockferry.engine.kv.spec import KVCacheConfig, MambaSpec
from blockferry.engine.wire import BlockDeltas
from blockferry.engine.worker.state_inputs import StateBlocks, StateRows

UNWRITTEN = 0
GARBAGE = 7
NO_BLOCK = -1
_NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Span:
    """A row's chunk: positions [start, stop), drafts last, with the chain numbers of [0, stop)."""

    row: int
    start: int
    stop: int
    num_prompt_tokens: int
    states: np.ndarray
    num_drafts: int = 0

    @property
    def state_rows(self) -> StateRows:
        """The same as one row of a step."""
        values = (self.row, self.start, self.stop - self.start - self.num_drafts, self.num_drafts)
        row, computed, known_len, num_drafts = (np.array([value], np.int32) for value in values)
        return StateRows(rows_R=row, computed_R=computed, known_lens_R=known_len, num_drafts_R=num_drafts)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A state that a span reads, and one that it writes."""

    source: int  # of no meaning where the row starts
    target: int
    position: int  # of the last token that the state written is of


class SimCache:
    """The pages and tables of one worker, all groups.

    Pages of different groups may lie over each other, in one pool of equal blocks as in slabs. Memory is cut into
    parts, the largest pieces that every page is a whole number of; each knows which page was last written there. A
    page loses its content when another one is written over any part of it.
    """

    def __init__(self, config: KVCacheConfig, *, max_rows: int, max_model_len: int) -> None:
        self.specs = [group.spec for group in config.groups]
        self.sizes = [spec.tokens_per_block for spec in self.specs]
        self.is_state = [isinstance(spec, MambaSpec) for spec in self.specs]
        self.tables = [
            BlockTable(max_rows=max_rows, max_blocks=self._max_columns(i, max_model_len)) for i in self.groups
        ]
        self.state_blocks = [StateBlocks(table, size) for table, size in zip(self.tables, self.sizes)]
        for table in self.tables:
            table.block_ids[:] = NO_BLOCK
        pages_per_slab = config.slab.pages_per_slab if config.slab else (1,) * len(self.specs)
        num_parts = math.lcm(*pages_per_slab)
        self.parts_per_page = [num_parts // pages for pages in pages_per_slab]
        num_pages = [config.slab.num_pages(group) if config.slab else config.num_blocks - 1 for group in self.groups]
        num_slots = [1 if is_state else size for size, is_state in zip(self.sizes, self.is_state)]
        self.content = [np.full((1 + n, k), UNWRITTEN, np.int64) for n, k in zip(num_pages, num_slots)]
        self.writer = [np.full((1 + n, k), _NOBODY, np.int8) for n, k in zip(num_pages, num_slots)]  # group of content
        num_parts = max(n * k for n, k in zip(num_pages, self.parts_per_page))
        self.page_of_part = np.full((num_parts, 2), _NOBODY, np.int32)  # group, block

    def _max_columns(self, group: int, max_model_len: int) -> int:
        spec = self.specs[group]
        num_columns = -(-max_model_len // self.sizes[group]) + 1
        return num_columns + (spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0)

    @property
    def groups(self) -> range:
        return range(len(self.specs))

    def parts(self, group: int, block_id: int) -> range:
        """Parts of memory that a page takes."""
        count = self.parts_per_page[group]
        return range((block_id - 1) * count, block_id * count)

    def claim(self, group: int, block_ids) -> None:
        """Write over whatever was in the memory of these pages before, unless it was they themselves."""
        for block_id in set(np.asarray(block_ids).tolist()):
            parts = self.parts(group, block_id)
            others = {(*page,) for page in self.page_of_part[parts.start : parts.stop].tolist()} - {(group, block_id)}
            if not others:
                continue
            self.content[group][block_id], self.writer[group][block_id] = UNWRITTEN, _NOBODY
            for other, other_id in others - {(_NOBODY, _NOBODY)}:
                self.content[other][other_id], self.writer[other][other_id] = UNWRITTEN, group
                if self.is_state[other]:
                    self.writer[group][block_id] = other  # what it left behind, until it is cleared
            self.page_of_part[parts.start : parts.stop] = group, block_id

    # what plans bring

    def forget(self, row: int) -> None:
        for table in self.tables:
            table.clear(row)
            table.block_ids[row] = NO_BLOCK
        for blocks in self.state_blocks:
            blocks.forget(row)

    def apply(self, deltas: BlockDeltas) -> None:
        assert (deltas.block_id > 0).all(), "the null block was handed out"
        for group, table in enumerate(self.tables):
            mine = deltas.group == group
            table.set(deltas.row[mine], deltas.column[mine], deltas.block_id[mine])

    def zero(self, pairs) -> None:
        for group, block_id in pairs.tolist():
            assert not self.is_state[group], "a state is cleared, which its first chunk writes anyway"
            assert any(self.is_state), "a block is cleared though no state was ever in it"
            self.claim(group, [block_id])
            self.content[group][block_id], self.writer[group][block_id] = UNWRITTEN, _NOBODY

    def copy(self, triples, zeroed) -> None:
        sources = {(group, source) for group, source, _ in triples.tolist()}
        targets = {(group, target) for group, _, target in triples.tolist()}
        assert not sources & targets, "a copy of a copy in one step"
        assert len(targets) == len(triples), "two copies into one block"
        assert not sources & {(*pair,) for pair in zeroed.tolist()}, "a copy of a block that is new itself"
        for group, source, target in triples.tolist():
            self.claim(group, [target])
            self.content[group][target], self.writer[group][target] = (
                self.content[group][source],
                self.writer[group][source],
            )

    # what layers do

    def positions_read(self, group: int, span: Span):
        """Positions whose keys and values the span's tokens read, its own included."""
        first, reach = 0, self.specs[group].reach
        match reach:
            case FullReach():
                first = 0
            case WindowReach() | RetainedPromptReach():
                first = max(0, span.start - reach.window + 1)
            case ChunkReach():
                first = span.start // reach.chunk * reach.chunk
            case _:
                raise AssertionError(reach)
        if isinstance(reach, RetainedPromptReach) and first > span.num_prompt_tokens:
            return np.concatenate([np.arange(span.num_prompt_tokens), np.arange(first, span.stop)])
        return np.arange(0 if isinstance(reach, RetainedPromptReach) else first, span.stop)

    def blocks_read(self, group: int, span: Span) -> set[int]:
        """Blocks that the span reads before the step or in it."""
        if self.is_state[group]:
            return {one.source for one in self._passes(group, span)} if span.start else set()
        return set(self.blocks(group, span.row, self.positions_read(group, span)).tolist())

    def blocks_written(self, group: int, span: Span) -> set[int]:
        """Blocks that the span writes."""
        if self.is_state[group]:
            return {one.target for one in self._passes(group, span)}
        return set(self.blocks(group, span.row, np.arange(span.start, span.stop)).tolist())

    def _passes(self, group: int, span: Span) -> list[Pass]:
        """What a span does to a row's state, in order; tables and blocks are as the worker would take them."""
        first = self.state_blocks[group].metadata(span.state_rows, torch.device("cpu"))
        last_known = span.stop - span.num_drafts - 1
        passes = [
            Pass(source=int(one.source_R[0]), target=int(one.target_R[0]), position=last_known + number)
            for number, one in enumerate((first, *first.later_passes))
        ]
        num_columns = self.tables[group].num_blocks[span.row]
        mine = set(self.tables[group].block_ids[span.row, :num_columns].tolist())
        assert {one.target for one in passes} <= mine - {NO_BLOCK}, f"group {group}: {passes} are not of row {span.row}"
        return passes

    def blocks(self, group: int, row: int, positions):
        """The row's block of each position."""
        columns = positions // self.sizes[group]
        block_ids = self.tables[group].block_ids[row, columns]
        is_missing = (block_ids <= 0) | (columns >= self.tables[group].num_blocks[row])
        assert not is_missing.any(), f"group {group} has no block at columns {set(columns[is_missing])} of row {row}"
        return block_ids

    def read_states(self, span: Span) -> None:
        """Recurrent layers load the state that the chunk starts from, before anything is written."""
        for group in self.groups:
            if self.is_state[group] and span.start:
                block_id = np.array([self._passes(group, span)[0].source])
                self._check(group, span, np.array([span.start - 1]), block_id, slots=0)

    def write(self, span: Span) -> None:
        for group, size in enumerate(self.sizes):
            if self.is_state[group]:
                for one in self._passes(group, span):
                    self._write_state(group, one.target, span.states[one.position])
                continue
            positions = np.arange(span.start, span.stop)
            block_ids = self.blocks(group, span.row, positions)
            self.claim(group, block_ids)
            self.content[group][block_ids, positions % size] = span.states[positions]
            self.writer[group][block_ids, positions % size] = group

    def _write_state(self, group: int, block_id: int, number: int) -> None:
        self.claim(group, [block_id])
        self.content[group][block_id], self.writer[group][block_id] = number, group

    def settle(self, span: Span, num_accepted: int) -> None:
        """So many of a span's drafts are accepted."""
        for group in self.groups:
            if self.is_state[group]:
                copies = self.state_blocks[group].settle(span.state_rows, np.array([num_accepted], np.int32))
                for source, target in copies.tolist():
                    self._write_state(group, target, int(self.content[group][source, 0]))

    def read(self, span: Span) -> None:
        """Attention of every reach reads, after all of the step was written."""
        for group in self.groups:
            if self.is_state[group]:
                continue
            block_ids = self._require(group, span)
            left_by = set(np.unique(self.writer[group][block_ids]).tolist()) - {_NOBODY}
            assert not any(self.is_state[writer] for writer in left_by), f"bits of a state in blocks of group {group}"

    def _require(self, group: int, span: Span):
        """Every position that the span reads holds this row's tokens; returns their blocks."""
        positions = self.positions_read(group, span)
        block_ids = self.blocks(group, span.row, positions)
        self._check(group, span, positions, block_ids, slots=positions % self.sizes[group])
        return block_ids

    def _check(self, group: int, span: Span, positions, block_ids, *, slots) -> None:
        """Content of positions is that of this row's tokens."""
        found, writer = self.content[group][block_ids, slots], self.writer[group][block_ids, slots]
        where = f"group {group}, row {span.row}, positions {span.start} to {span.stop}"
        unwritten, wrong = found == UNWRITTEN, found != span.states[positions]
        assert not unwritten.any(), f"{where}: reads {positions[unwritten]}, which nobody wrote"
        assert not wrong.any(), f"{where}: finds other tokens' content at {positions[wrong]}"
        assert (writer == group).all(), f"{where}: finds content of groups {set(writer.tolist())}"

    # what transfers do

    def slots(self, group: int, block_ids, first_token: int, num_tokens: int):
        """(block, offset) arrays of num_tokens tokens, counted along block_ids from first_token on."""
        size = 1 if self.is_state[group] else self.sizes[group]
        positions = np.arange(first_token, first_token + num_tokens)
        assert len(block_ids) * size >= first_token + num_tokens, "more tokens than blocks"
        assert (np.asarray(block_ids) > 0).all(), "the null block is ferried"
        return np.asarray(block_ids)[positions // size], positions % size

    def send(self, part: TransferPart):
        """Bytes leave, one number per token, one for a state.

        Blocks that were given back may hold anything by now; nobody may use what is read of them then.
        """
        places = self.slots(part.src_group, part.src_block_ids, part.first_token, part.num_tokens)
        return np.where(
            self.writer[part.src_group][places] == part.src_group, self.content[part.src_group][places], GARBAGE
        )

    def receive(self, part: TransferPart, content) -> None:
        """Bytes land from outside."""
        self.claim(part.dst_group, part.dst_block_ids)
        places = self.slots(part.dst_group, part.dst_block_ids, part.dst_first_token, part.num_tokens)
        self.content[part.dst_group][places], self.writer[part.dst_group][places] = content, part.dst_group
