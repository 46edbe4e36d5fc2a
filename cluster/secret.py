"""The secret of a deployment: who knows it may talk to its scheduler, everybody else is refused by ZeroMQ itself.

Owns how CURVE keys come out of one secret. The public key of the bound side is told to nobody: it follows from the
secret, without which a connection ends in the handshake, before any message of ours is read. Knows no sockets'
addresses and keeps no secret.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
from typing import NamedTuple

import zmq
from zmq.utils import z85

_NUM_BYTES = 32


class _KeyPair(NamedTuple):
    public: bytes
    private: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSecret:
    """What the processes of one deployment share. Not shown by repr()."""

    text: str = dataclasses.field(repr=False)

    @classmethod
    def make(cls) -> ClusterSecret:
        """A new one, from the operating system's randomness."""
        return cls(text=secrets.token_hex(_NUM_BYTES))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let only peers that know the secret connect; before bind()."""
        own = _key_pair(self.text, "bound")
        socket.curve_publickey, socket.curve_secretkey = own
        socket.curve_server = True

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Prove to the bound side that we know the secret, and have it prove the same; before connect()."""
        own = _key_pair(self.text, "connecting")
        socket.curve_publickey, socket.curve_secretkey = own
        socket.curve_serverkey = _key_pair(self.text, "bound").public


@functools.lru_cache(maxsize=64)
def _key_pair(text: str, side: str) -> _KeyPair:
    """Any 32 bytes are a private key of Curve25519 (RFC 7748, section 5)."""
    private = z85.encode(hashlib.blake2b(side.encode(), key=text.encode(), digest_size=_NUM_BYTES).digest())
    return _KeyPair(public=zmq.curve_public(private), private=private)
