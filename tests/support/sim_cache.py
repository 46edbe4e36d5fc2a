"""What a simulated worker keeps: pages of numbers that stand for keys, values and states, and who may read them.

A slot of attention holds the chain number of its position, a page of state that of the last position it covers. Both
carry the group that wrote them, as pages move between groups. Every read is checked against the tokens of the row that
reads, so that a wrong hit, a missing copy, a block reused too early or a stale table entry is found where it happens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.reach import ChunkReach, FullReach, RetainedPromptReach, WindowReach
from blockferry.engine.kv.spec import KVCacheConfig, MambaSpec
from blockferry.engine.wire import BlockDeltas

UNWRITTEN = 0
GARBAGE = 7
NO_BLOCK = -1
_NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Span:
    """A row's chunk: positions [start, stop), with the chain numbers of [0, stop)."""

    row: int
    start: int
    stop: int
    num_prompt_tokens: int
    states: np.ndarray


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
        self.tables = [BlockTable(max_rows=max_rows, max_blocks=-(-max_model_len // size) + 1) for size in self.sizes]
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
        """Positions whose content the span's tokens read: of attention its own included, of states the one before."""
        if self.is_state[group]:
            return np.arange(span.start)[-1:]
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

    def positions_written(self, group: int, span: Span):
        """Positions whose content the span's tokens write: of states the last."""
        return np.arange(span.stop - 1 if self.is_state[group] else span.start, span.stop)

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
            if self.is_state[group]:
                self._require(group, span)

    def write(self, span: Span) -> None:
        for group, size in enumerate(self.sizes):
            positions = self.positions_written(group, span)
            block_ids = self.blocks(group, span.row, positions)
            self.claim(group, block_ids)
            slots = 0 if self.is_state[group] else positions % size
            self.content[group][block_ids, slots] = span.states[positions]
            self.writer[group][block_ids, slots] = group

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
        slots = 0 if self.is_state[group] else positions % self.sizes[group]
        found, writer = self.content[group][block_ids, slots], self.writer[group][block_ids, slots]
        where = f"group {group}, row {span.row}, positions {span.start} to {span.stop}"
        unwritten, wrong = found == UNWRITTEN, found != span.states[positions]
        assert not unwritten.any(), f"{where}: reads {positions[unwritten]}, which nobody wrote"
        assert not wrong.any(), f"{where}: finds other tokens' content at {positions[wrong]}"
        assert (writer == group).all(), f"{where}: finds content of groups {set(writer.tolist())}"
        return block_ids

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
