"""What is really in every block: a worker that writes names of tokens where a real one writes keys and values.

Knows nothing of hashes, owners or free blocks. What is read must be what the reader's own tokens would have written:
that is all a ledger is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from support.kv_accounts import export_length
from support.kv_places import Places

from blockferry.engine.kv.groups import one_layer
from blockferry.engine.kv.reach import ChunkReach, FullReach, RetainedPromptReach, WindowReach
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec

Table = list[int]


class Prefixes:
    """Names of token prefixes: equal prefixes have one name, and no two have the same."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, object], int] = {}
        self._parents = [0]

    def root(self, salt: str) -> int:
        """Of no token."""
        return self._name(0, salt)

    def next(self, name: int, token: int) -> int:
        """Of a prefix and one token more."""
        return self._name(name, token)

    def parent(self, name: int) -> int:
        """Of the prefix without its last token; 0 for none."""
        return self._parents[name]

    def _name(self, parent: int, what: object) -> int:
        name = self._names.setdefault((parent, what), len(self._parents))
        if name == len(self._parents):
            self._parents.append(parent)
        return name


@dataclasses.dataclass
class Page:
    """One block's content: names by slot; a state is in slot 0."""

    group: int
    slots: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens [start, stop) of a sequence to compute in one step; names[n] is of its first n tokens."""

    names: list[int]
    num_prompt_tokens: int
    tables: tuple[Table, ...]
    start: int
    stop: int
    state_blocks: tuple[int | None, ...]  # per group: where the worker left the running state, if it knows
    num_rejected: int = 0  # of the last tokens computed: drafts that nobody may read
    num_drafts: int = 0  # of the last tokens, to be verified


class Shadow:
    """The pages of one pool."""

    def __init__(self, config: KVCacheConfig, prefixes: Prefixes, *, num_hash_lookahead_tokens: int) -> None:
        groups = config.groups
        self.prefixes = prefixes
        self.places = Places(config)
        self.hash_block_size = config.hash_block_size
        self.slabs: dict[int, set[int]] = {}  # places of the pages of each slab that have content
        self.specs = [one_layer(group.spec) for group in groups]
        # keys and values of a draft depend on the token after theirs
        self.is_draft = [group.is_draft for group in groups]
        self.num_ahead = [int(group.is_draft or num_hash_lookahead_tokens > 0) for group in groups]
        self.pages: dict[int, Page] = {}  # by place
        self.num_reads = 0

    # one step

    def clear(self, group: int, block_id: int) -> None:
        """Zero a page."""
        self.pages.pop(self.places.of(group, block_id), None)

    def copy(self, group: int, source: int, target: int) -> None:
        """Copy one page."""
        page = self._page(group, source)
        assert page is not None, (group, source)
        self._overwrite(group, target).slots.update(page.slots)

    def load(self, work: Work) -> None:
        """Content of tokens [start, stop) arrives from elsewhere, where it is still in reach."""
        for group, spec in enumerate(self.specs):
            table = work.tables[group]
            if isinstance(spec, MambaSpec):
                column = (work.stop - 1) // spec.block_size
                self._write(group, table[column], 0, work.names[work.stop])
            elif isinstance(spec, AttentionSpec) and spec.prefix_cacheable:
                for position in range(work.start, work.stop):
                    if table[position // spec.tokens_per_block]:
                        self._write_token(group, spec, work, position)

    def compute(self, works: list[Work]) -> list[dict[int, int]]:
        """Run one step: states are read before anything is written, tokens after everything is.

        Returns per work the block of each group's running state.
        """
        for work in works:
            self._read_states(work)
        blocks = [self._write_states(work) for work in works]
        for work in works:
            for group, spec in enumerate(self.specs):
                if isinstance(spec, AttentionSpec) and spec.prefix_cacheable:
                    for position in range(work.start, work.stop - work.num_rejected):
                        self._write_token(group, spec, work, position)
        for work in works:
            for group, spec in enumerate(self.specs):
                if isinstance(spec, AttentionSpec) and spec.prefix_cacheable:
                    self._read_tokens(group, spec, work)
        return blocks

    # attention

    def _write_token(self, group: int, spec: KVCacheSpec, work: Work, position: int) -> None:
        column, slot = divmod(position, spec.tokens_per_block)
        self._write(group, work.tables[group][column], slot, work.names[position + 1 + self.num_ahead[group]])

    def _read_tokens(self, group: int, spec: AttentionSpec, work: Work) -> None:
        stop = work.stop - work.num_rejected
        for position in self._positions(spec, work, stop):
            column, slot = divmod(position, spec.tokens_per_block)
            wanted = work.names[position + 1 + self.num_ahead[group]]
            page = self._page(group, work.tables[group][column])
            if self.is_draft[group] and slot == spec.tokens_per_block - 1 and page is not None:
                # several blocks may carry one hash, and the token after theirs is not part of it
                found = page.slots.get(slot, 0)
                wanted = found if self.prefixes.parent(found) == work.names[position + 1] else wanted
            self._read(group, work.tables[group][column], slot, wanted)

    def _positions(self, spec: AttentionSpec, work: Work, stop: int) -> Iterable[int]:
        match spec.reach:
            case FullReach():
                return range(stop)
            case WindowReach(window=window):
                return range(max(0, work.start - window + 1), stop)
            case ChunkReach(chunk=chunk):
                return range(work.start // chunk * chunk, stop)
            case RetainedPromptReach(window=window):
                tail = max(0, work.start - window)
                return [*range(min(work.num_prompt_tokens, tail)), *range(tail, stop)]
        raise AssertionError(spec)

    # states

    def _read_states(self, work: Work) -> None:
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec) and work.start:
                known = work.state_blocks[group]
                block_id = work.tables[group][(work.start - 1) // spec.block_size] if known is None else known
                self._read(group, block_id, 0, work.names[work.start])

    def _write_states(self, work: Work) -> dict[int, int]:
        """The state after the last token that is no draft, and one per accepted draft, in the row's last columns.

        A state that may be kept but is not in the column of its length is copied there, if the row still has that; no
        draft's own block is ever kept.
        """
        blocks: dict[int, int] = {}
        for group, spec in enumerate(self.specs):
            if not isinstance(spec, MambaSpec):
                continue
            table, first_end, end = work.tables[group], work.stop - work.num_drafts, work.stop - work.num_rejected
            running = len(table) - 1 - spec.num_speculative_blocks
            for accepted in range(first_end, end + 1):
                self._write(group, table[running + accepted - first_end], 0, work.names[accepted])
            blocks[group] = table[running + end - first_end]
            self._export_state(group, spec, work, running)
            for boundary in range(first_end, end + 1):
                column = boundary // spec.block_size - 1
                if boundary % spec.block_size == 0 and 0 <= column <= running and table[column]:
                    assert table[column] != blocks[group] or boundary == end, (work, column)
                    self._write(group, table[column], 0, work.names[boundary])
        return blocks

    def _export_state(self, group: int, spec: MambaSpec, work: Work, running: int) -> None:
        """The state of the last length that a hit on the whole prompt can have, if the chunk passes that."""
        length = export_length(spec, work.num_prompt_tokens, self.hash_block_size)
        column = min(-(-length // spec.block_size), running) - 1
        is_within = work.start < length < work.stop and column > (work.start - 1) // spec.block_size
        if is_within and work.tables[group][column]:
            self._write(group, work.tables[group][column], 0, work.names[length])

    # pages

    def _page(self, group: int, block_id: int) -> Page | None:
        page = self.pages.get(self.places.of(group, block_id))
        return page if page is not None and page.group == group else None

    def _overwrite(self, group: int, block_id: int) -> Page:
        """A page of the group without content; what other groups had in its bytes is gone."""
        place, slab = self.places.of(group, block_id), self.places.slab_of(group, block_id)
        if slab is not None:
            mine = self.slabs.setdefault(slab, set())
            for other in [other for other in mine if other in self.pages and self.pages[other].group != group]:
                del self.pages[other]
            mine.add(place)
        page = self.pages[place] = Page(group, {})
        return page

    def _write(self, group: int, block_id: int, slot: int, name: int) -> None:
        assert block_id, f"group {group} writes {name} into the null block"
        page = self._page(group, block_id)
        if page is None:
            page = self._overwrite(group, block_id)
        page.slots[slot] = name

    def _read(self, group: int, block_id: int, slot: int, wanted: int) -> None:
        self.num_reads += 1
        page = self._page(group, block_id)
        assert block_id, f"group {group} reads {wanted} from the null block"
        found = None if page is None else page.slots.get(slot)
        assert found == wanted, f"group {group} reads slot {slot} of block {block_id}, {page}, and wants {wanted}"
