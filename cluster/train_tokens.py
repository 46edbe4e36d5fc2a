"""A checkpoint's tokenizer as the training of draft heads needs it."""

from __future__ import annotations

from pathlib import Path

from blockferry.cluster.api.tokenizer import Tokenizer


class CheckpointTokens:
    """training.prompts.TextTokens of a checkpoint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> CheckpointTokens:
        """Raises ModelLoadError."""
        return cls(Tokenizer.load(folder))

    def encode(self, text: str) -> list[int]:
        """See TextTokens."""
        return self._tokenizer.encode(text, add_special_tokens=True)

    def chat(self, message: str) -> str | None:
        """See TextTokens."""
        if self._tokenizer.chat_template is None:
            return None
        messages = [{"role": "user", "content": message}]
        return self._tokenizer.chat_template.render(messages, add_generation_prompt=True, variables={})

    def encode_chat(self, text: str) -> list[int]:
        """See TextTokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)
