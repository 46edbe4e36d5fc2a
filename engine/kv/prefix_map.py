"""From block hash to block: one group's index of the prefix cache.

Owns the map only; which hash a block carries is the BlockPool's to know.
"""

from __future__ import annotations

from collections.abc import Iterable


class PrefixMap:
    """Finds the block that carries a hash. Several blocks may carry one hash; none is merged away.

    The first to be added is found; when it goes, the next in order is. Mutated by its BlockPool only.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Distinct hashes."""
        return len(self._first)

    def add(self, digests: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """Let each block be found under its digest."""
        find_or_set = self._first.setdefault
        for digest, block_id in zip(digests, block_ids, strict=True):
            if find_or_set(digest, block_id) != block_id:
                self._others.setdefault(digest, []).append(block_id)

    def remove(self, digest: bytes, block_id: int) -> None:
        """Forget one carrier; the other ones stay findable."""
        others = self._others.get(digest)
        if others is None:
            assert self._first[digest] == block_id, (self._first[digest], block_id)
            del self._first[digest]
            return
        if self._first[digest] == block_id:
            self._first[digest] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._others[digest]

    def carries(self, digest: bytes, block_id: int) -> bool:
        """Whether block_id is one of the blocks under digest."""
        return self._first.get(digest) == block_id or block_id in self._others.get(digest, ())

    def longest_run(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the leading digests that are all cached, left to right."""
        find = self._first.get
        block_ids: list[int] = []
        for digest in digests:
            block_id = find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_carriers(self) -> int:
        """Blocks in the map, duplicates counted each."""
        return len(self._first) + sum(len(others) for others in self._others.values())

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._others.clear()
