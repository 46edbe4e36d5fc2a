"""Beginnings for the model to continue: chats, whose questions it mostly writes itself, and plain text.

An instruction model that is given the beginning of a user's turn writes a question it might be asked (Xu et al. 2024,
"Magpie", arXiv 2406.08464), so no data set is needed. Everything drawn is a function of the seed.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence
from typing import Protocol

from blockferry.engine.request import SamplingParams
from blockferry.engine.spec_decode.training.texts import PASSAGE_TASKS, python_passages, subject_questions
from blockferry.engine.spec_decode.training.writer import Assignment

MAX_PROMPT_TOKENS = 256
MAX_QUESTION_TOKENS = 80
MARK = "\u2603"  # stands for a message while the chat template is taken apart
HELD_OUT_OF = 10  # every so manieth passage is for evaluation alone


class TextTokens(Protocol):
    """A checkpoint's tokenizer, as far as prompts need it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, as the model is given it."""

    def chat(self, message: str) -> str | None:
        """The text of a chat in which a user has said this and the model is to answer; None: no chat model."""

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what chat() returned, or a part of it."""


class Kind(enum.Enum):
    """What a beginning is."""

    OWN_QUESTION = "a chat whose question the model wrote"
    SUBJECT = "a chat about a drawn subject"
    PASSAGE = "a chat about a passage"
    PLAIN = "a passage's first words"
    NOISE = "random tokens, after which models repeat themselves"


SHARES = {Kind.OWN_QUESTION: 0.45, Kind.SUBJECT: 0.15, Kind.PASSAGE: 0.1, Kind.PLAIN: 0.25, Kind.NOISE: 0.05}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """What surrounds a user's message."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    end_token_id: int  # that ends a turn

    @classmethod
    def of(cls, tokens: TextTokens) -> ChatFrame | None:
        """Of a model with a chat template."""
        text = tokens.chat(MARK)
        if text is None or MARK not in text:
            return None
        before, after = (tuple(tokens.encode_chat(part)) for part in text.split(MARK, 1))
        return cls(before=before, after=after, end_token_id=after[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """How long answers are and how they are drawn."""

    max_output_tokens: int = 224
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7, 1.0)
    stop_token_ids: tuple[int, ...] = ()


class PromptMaker:
    """Draws assignments. With a frame of None all are plain text."""

    def __init__(self, tokens: TextTokens, frame: ChatFrame | None, settings: PromptSettings, vocab_size: int) -> None:
        self._tokens = tokens
        self._frame = frame
        self._settings = settings
        self._vocab_size = vocab_size
        passages = python_passages()
        self._held_out = passages[::HELD_OUT_OF]
        self._passages = [one for number, one in enumerate(passages) if number % HELD_OUT_OF]

    def question(self, rng: random.Random) -> Assignment:
        """Has the model write a user's message."""
        assert self._frame is not None, "only chat models are asked"
        sampling = SamplingParams(
            max_tokens=MAX_QUESTION_TOKENS,
            temperature=1.0,
            top_p=0.95,
            seed=rng.getrandbits(31),
            stop_token_ids=(self._frame.end_token_id,),
        )
        return Assignment(prompt=self._frame.before, sampling=sampling)

    def kinds(self, rng: random.Random, num_prompts: int) -> list[Kind]:
        """What the next prompts are to be."""
        kinds = list(SHARES) if self._frame is not None else [Kind.PLAIN, Kind.NOISE]
        return rng.choices(kinds, [SHARES[kind] for kind in kinds], k=num_prompts)

    def prompt(self, kind: Kind, question: Sequence[int], rng: random.Random) -> Assignment:
        """A beginning of this kind; `question` is what the model wrote, where that is the kind."""
        match kind:
            case Kind.OWN_QUESTION:
                token_ids = self._chat(question)
            case Kind.SUBJECT:
                token_ids = self._chat(self._tokens.encode(subject_questions(rng)))
            case Kind.PASSAGE:
                text = rng.choice(PASSAGE_TASKS).format(rng.choice(self._passages))
                token_ids = self._chat(self._tokens.encode(text))
            case Kind.PLAIN:
                token_ids = self._tokens.encode(rng.choice(self._passages))[: rng.randrange(8, 64)]
            case Kind.NOISE:
                token_ids = [rng.randrange(self._vocab_size) for _ in range(rng.randrange(8, 96))]
        return self._assignment(token_ids, rng.choice(self._settings.temperatures), seed=rng.getrandbits(31))

    def greedy_chat(self, message: str) -> Assignment:
        """A user's message, answered greedily."""
        return self._assignment(self._chat(self._tokens.encode(message)), 0.0, seed=0)

    def held_out_texts(self, num_texts: int) -> list[Assignment]:
        """Passages of which no prompt is made, continued greedily from their first 48 tokens."""
        step = max(1, len(self._held_out) // num_texts)
        chosen = self._held_out[::step][:num_texts]
        return [self._assignment(self._tokens.encode(text)[:48], 0.0, seed=0) for text in chosen]

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._frame is not None

    def _chat(self, message: Sequence[int]) -> list[int]:
        assert self._frame is not None, "only chat models are asked"
        room = MAX_PROMPT_TOKENS - len(self._frame.before) - len(self._frame.after)
        return [*self._frame.before, *message[:room], *self._frame.after]

    def _assignment(self, token_ids: Sequence[int], temperature: float, *, seed: int) -> Assignment:
        sampling = SamplingParams(
            max_tokens=self._settings.max_output_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self._settings.stop_token_ids,
        )
        return Assignment(prompt=tuple(token_ids[:MAX_PROMPT_TOKENS]), sampling=sampling)
