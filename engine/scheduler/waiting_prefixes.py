"""Which prefixes an instance will have computed once everybody who waits there has come in.

Owns one count per digest of all waiting sequences. As digests chain, whoever shares one shares all before it.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence


class WaitingPrefixes:
    """Digests of the sequences in one waiting queue. Owned by that queue."""

    def __init__(self) -> None:
        self._counts: collections.Counter[bytes] = collections.Counter()

    @property
    def num_counted(self) -> int:
        """Digests added and not removed, equal ones counted each. Cost: O(digests)."""
        return self._counts.total()

    def add(self, digests: Sequence[bytes]) -> None:
        """A sequence begins to wait. Cost: about 0.1 us a digest."""
        self._counts.update(digests)

    def remove(self, digests: Sequence[bytes]) -> None:
        """One that was added with these digests waits no more."""
        counts = self._counts
        for digest in digests:
            if counts[digest] == 1:
                del counts[digest]
            else:
                counts[digest] -= 1

    def num_shared(self, digests: Sequence[bytes]) -> int:
        """How many leading digests some waiting sequence has too. Cost: O(log digests)."""
        return bisect.bisect_left(digests, 1, key=lambda digest: digest not in self._counts)


def num_shared(digests: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many leading digests two chains have in common. Cost: O(log digests)."""
    stop = min(len(digests), len(others))
    return bisect.bisect_left(range(stop), 1, key=lambda index: digests[index] != others[index])
