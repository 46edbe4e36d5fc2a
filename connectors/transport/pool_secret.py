"""The secret of one process's pools: it travels in their keys, and who speaks to the process proves that he has it.

Owns what is shown instead of the secret itself: tags of greetings, and the token of messages that compiled code checks.
Whoever merely reaches the process's address has neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import struct

SECRET_BYTES = 16
TAG_BYTES = 16
TOKEN_WORDS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSecret:
    """Not shown by repr()."""

    key: bytes = dataclasses.field(repr=False)

    @classmethod
    def make(cls) -> PoolSecret:
        """A new one, from the operating system's randomness."""
        return cls(key=os.urandom(SECRET_BYTES))

    def tag(self, kind: bytes, number: int) -> bytes:
        """What only who has the secret can say about a number, and in each direction (`kind`) differently."""
        return self._digest(kind + struct.pack("<Q", number))

    def is_tag(self, shown: bytes, kind: bytes, number: int) -> bool:
        """Whether somebody who has the secret has said it; takes as long for every wrong one."""
        return hmac.compare_digest(shown, self.tag(kind, number))

    @property
    def token(self) -> tuple[int, int]:
        """What messages show, as two words."""
        first, second = struct.unpack("<qq", self._digest(b"token"))
        return first, second

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.key, digest_size=TAG_BYTES).digest()
