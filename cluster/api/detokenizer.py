"""Token ids to text, one piece at a time: characters are never split, lost or repeated.

Two ways, one protocol. The pieces of a sequence, joined, are its whole text:

    ByteLevelDetokenizer   byte-level BPE: every token is a fixed string of bytes, so an incremental UTF-8
                           decoder over a table is exact and costs about a microsecond a token
    WindowDetokenizer      anything else: decode a sliding window twice and show the difference (the method of
                           vLLM's detokenizer_utils and TGI)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_BYTES_PER_CHAR = 4
WINDOW_TOKENS = 6  # context that a sentencepiece decoder needs to know about spaces
MAX_HELD_TOKENS = 24  # more unfinished tokens than any character has: show what there is


class Detokenizer(Protocol):
    """Decodes one sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """The text of an unfinished last character (replacement characters), at the end of the sequence."""


class ByteLevelDetokenizer:
    """Exact incremental decoding over a table of every token's bytes."""

    def __init__(self, token_bytes: Sequence[bytes], context: Sequence[int] = ()) -> None:
        """`token_bytes[id]` is empty for tokens that are not shown; `context` is the prompt's tail."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context[-MAX_BYTES_PER_CHAR:]:
            self._decoder.decode(token_bytes[token_id])

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Incremental decoding with nothing but a decode function of whole sequences.

    ids:   ... | prefix .......... | read ........ newest |
               the window decodes alike with and without the part after `read`; the difference is the piece
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-WINDOW_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix :])
        if text.endswith("\ufffd") and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._advance(self._decode(self._ids[self._prefix :]))

    def _advance(self, text: str) -> str:
        shown = self._decode(self._ids[self._prefix : self._read])
        if len(text) <= len(shown):
            # Tokens that show nothing (special ones): the window stays, but never grows without end.
            if len(self._ids) - self._prefix > 2 * MAX_HELD_TOKENS:
                self._prefix = self._read
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        if self._prefix > WINDOW_TOKENS:
            del self._ids[: self._prefix]
            self._read -= self._prefix
            self._prefix = 0
        return text[len(shown) :]
