"""Has the model write the training text, part by part, until there is enough of it or time is up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.engine.spec_decode.training.corpus import Writing, save_writings
from blockferry.engine.spec_decode.training.prompts import Kind, PromptMaker
from blockferry.engine.spec_decode.training.writer import Assignment, ModelWriter, Tick

SEQUENCES_PER_PART = 256


def write_part(path: Path, writer: ModelWriter, maker: PromptMaker, *, seed: int, tick: Tick) -> None:
    """One part of the corpus: a function of model, Python's documentation and seed."""
    rng = random.Random(seed)
    kinds = maker.kinds(rng, SEQUENCES_PER_PART)
    questions = write(writer, [maker.question(rng) for kind in kinds if kind is Kind.OWN_QUESTION], tick)
    written = iter([one.token_ids[one.num_prompt_tokens :] for one in questions])
    prompts = []
    for kind in kinds:
        question = next(written).tolist() if kind is Kind.OWN_QUESTION else []
        prompts.append(maker.prompt(kind, question[:-1], rng))
    save_writings(path, write(writer, prompts, tick))


def write(writer: ModelWriter, assignments: Sequence[Assignment], tick: Tick) -> list[Writing]:
    """Assignments with what the model wrote."""
    outputs = writer.write(assignments, tick)
    return [
        Writing(token_ids=np.array([*assignment.prompt, *output], np.int32), num_prompt_tokens=len(assignment.prompt))
        for assignment, output in zip(assignments, outputs, strict=True)
    ]
