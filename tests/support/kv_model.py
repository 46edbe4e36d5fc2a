"""The KV ledger the obvious way: lists and dicts, one request and one block at a time. The tests' oracle.

Keys are the tokens themselves, so the model knows nothing of hashing; the free list is a plain list.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[str, tuple[int, ...]]


class NaiveLedger:
    """One group of full attention."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int, num_watermark_blocks: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_watermark_blocks = num_watermark_blocks
        self.free_list = list(range(1, num_blocks))
        self.owners = dict.fromkeys(range(1, num_blocks), 0)
        self.key_of: dict[int, Key] = {}
        self.carriers: dict[Key, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.num_cached: dict[int, int] = {}

    def key(self, salt: str, tokens: Sequence[int], block: int) -> Key:
        return salt, tuple(tokens[: (block + 1) * self.block_size])

    def lookup(self, salt: str, tokens: Sequence[int]) -> list[int]:
        hit: list[int] = []
        for block in range((len(tokens) - 1) // self.block_size):
            carriers = self.carriers.get(self.key(salt, tokens, block))
            if not carriers:
                break
            hit.append(carriers[0])
        return hit

    def num_needed(self, row: int, num_tokens: int, hit: list[int]) -> int:
        held = len(self.tables.get(row, [])) + len(hit)
        idle = sum(self.owners[block] == 0 for block in hit)
        return idle + max(0, -(-num_tokens // self.block_size) - held)

    def has_room(
        self, row: int, num_slots: int, hit: list[int], *, num_tokens: int, fit: bool, reserved: int, watermark: bool
    ) -> bool:
        spare = self.num_watermark_blocks if watermark else 0
        free = len(self.free_list)
        if fit and self.num_needed(row, min(num_tokens, self.max_model_len), hit) + spare > free:
            return False
        return self.num_needed(row, num_slots, hit) + spare <= free - reserved

    def adopt(self, row: int, hit: list[int]) -> None:
        for block in hit:
            if self.owners[block] == 0:
                self.free_list.remove(block)
            self.owners[block] += 1
        self.tables[row] = list(hit)
        self.num_cached[row] = len(hit)

    def grow(self, row: int, num_tokens: int) -> None:
        table = self.tables.setdefault(row, [])
        self.num_cached.setdefault(row, 0)
        while len(table) * self.block_size < num_tokens:
            block = self.free_list.pop(0)
            self.uncache(block)
            self.owners[block] = 1
            table.append(block)

    def cache(self, row: int, salt: str, tokens: Sequence[int]) -> None:
        for block in range(self.num_cached[row], len(tokens) // self.block_size):
            key = self.key(salt, tokens, block)
            block_id = self.tables[row][block]
            self.key_of[block_id] = key
            self.carriers.setdefault(key, []).append(block_id)
            self.num_cached[row] = block + 1

    def uncache(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            self.carriers[key].remove(block)
            if not self.carriers[key]:
                del self.carriers[key]

    def pop(self, row: int) -> list[int]:
        self.num_cached.pop(row)
        return self.tables.pop(row)

    def release(self, blocks: list[int]) -> None:
        front: list[int] = []
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if block in self.key_of:
                    self.free_list.append(block)
                else:
                    front.append(block)
        self.free_list[:0] = front

    def reset(self) -> bool:
        if any(self.owners.values()):
            return False
        self.key_of.clear()
        self.carriers.clear()
        return True
