"""Prompts and reference tokens for parity tests: what Hugging Face transformers says, token for token."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CODE = """def quicksort(items):
    if len(items) <= 1:
        return items
    pivot = items[0]
"""

RAW_TEXTS = (
    "The",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "从前有座山,山里有座庙,庙里有个老和尚",
    "深度学习是机器学习的一个分支,它",
    "🎉🎊🥳 Party time! 🎈🎁",
    "Emoji test: 👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇫🇷 France",
    CODE,
    "#include <stdio.h>\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM users GROUP BY",
    "1, 1, 2, 3, 5, 8, 13,",
    "Der schnelle braune Fuchs springt über",
    "\n\n\t  leading white space",
)

CHATS = (
    "What is the capital of France?",
    "用中文介绍一下你自己。",
    "Write a haiku about the sea.",
    "Explain how a paged KV cache works, in two sentences.",
)

LONG_LENGTHS = (300, 777, 1500)
SHORT_NAMES = ("raw0", "raw3", "raw6", "raw7", "chat0", "chat1", "prose300")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParityPrompt:
    """One prompt as token ids."""

    name: str
    token_ids: tuple[int, ...]


def long_text() -> str:
    """Real English prose that ships with every CPython."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def parity_prompts(tokenizer: Any) -> list[ParityPrompt]:
    """The twenty prompts, 1 to 1,500 tokens: raw, chat, Chinese, emoji, code and long prose."""
    prompts = [
        ParityPrompt(name=f"raw{i}", token_ids=tuple(tokenizer.encode(text))) for i, text in enumerate(RAW_TEXTS)
    ]
    for i, text in enumerate(CHATS):
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append(ParityPrompt(name=f"chat{i}", token_ids=tuple(ids)))
    prose = tokenizer.encode(long_text()[:20000])
    prompts += [ParityPrompt(name=f"prose{n}", token_ids=tuple(prose[n : 2 * n])) for n in LONG_LENGTHS]
    return prompts


def short_prompts(tokenizer: Any) -> list[ParityPrompt]:
    """Seven of them, none long."""
    return [prompt for prompt in parity_prompts(tokenizer) if prompt.name in SHORT_NAMES]


class Reference:
    """What transformers says in float32, by one teacher-forced pass.

    If every output token is the argmax after the prompt and the output tokens before it, the output is the greedy
    one, by induction; one pass costs a fraction of generating token by token.
    """

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy_after(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The greedy token at every position of `output`; equals it exactly when `output` is greedy."""
        token_ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = self._model(token_ids, logits_to_keep=len(output)).logits
        answer: list[int] = logits[0].argmax(-1).tolist()
        return answer
