"""Text that every Python installation ships, and subjects to ask about: what prompts are made of. Reads files only."""

from __future__ import annotations

import ast
import functools
import pydoc_data.topics
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

MIN_PASSAGE_CHARS = 200
MAX_PASSAGE_CHARS = 1200

SUBJECTS = tuple(
    part.strip()
    for part in """
    black holes; photosynthesis; the French Revolution; inflation; vaccines; chess openings; baking sourdough bread;
    the water cycle; jazz music; machine learning; the Roman Empire; plate tectonics; job interviews; meditation;
    the human heart; solar panels; Shakespeare's tragedies; budgeting; electric cars; the Great Wall of China; coffee;
    gravity; the immune system; football tactics; climate change; database indexes; the Renaissance; healthy breakfasts;
    the stock market; volcanoes; public speaking; sleep; whales; the printing press; quantum computing; gardening;
    world religions; the Moon; time management; antibiotics; the Silk Road; photography; running a marathon; bees;
    probability; the Second World War; home insulation; learning a new language; DNA; renewable energy; the Amazon
    rainforest; writing a novel; hash tables; the Industrial Revolution; anxiety; pasta; the solar system; insurance;
    ancient Egypt; bicycles; the internet; friendship; dinosaurs; prime numbers; the Cold War; yoga; recycling; tea;
    airplanes; democracy; sorting algorithms; coral reefs; the periodic table; travel to Japan; raising a puppy;
    electricity; Greek mythology; teamwork; diabetes; the Olympic Games; earthquakes; operating systems; painting;
    cloud storage; the United Nations; dreams; weather forecasts; the Pythagorean theorem; camping; ethics; rivers of
    Africa; cyber security; opera; protein; the Ottoman Empire; negotiation; robots; the speed of light; rice; birds;
    recursion; house plants; the Enlightenment; small talk; lasers; Spanish cuisine; magnetism; the city of Paris;
    supply and demand; knitting; the nervous system; Linux; poetry; swimming; Mars; wine; statistics; folk tales;
    the Panama Canal; stress; batteries; JavaScript; philosophy; elephants; trains; the Python language; mathematics
    """.replace("\n", " ").split(";")
)

QUESTIONS = (
    "What is the most important thing to know about {}?",
    "Explain {} to a ten-year-old.",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "How does {} affect our daily life?",
    "Tell me a story that has to do with {}.",
    "List three books or topics to start with if I want to learn about {}.",
    "Summarize the history of {}.",
    "Why do people care about {}?",
    "Write an email to a colleague about {}.",
    "What are common mistakes related to {}?",
    "Create a step-by-step plan around {}.",
    "Compare {} with something similar.",
    "What would you say to someone who knows nothing about {}?",
    "Write three quiz questions about {}, with answers.",
    "Can you help me understand {}?",
    "{}: what is it, in one sentence?",
    "Write a blog post introduction about {}.",
)

PASSAGE_TASKS = (
    "Summarize the following text.\n\n{}",
    "Explain this in simple words:\n\n{}",
    "What is this text about?\n\n{}",
    "Rewrite the following more briefly:\n\n{}",
    "List the key points of this text:\n\n{}",
)


def subject_questions(rng: random.Random) -> str:
    """A question about a subject, both drawn."""
    return rng.choice(QUESTIONS).format(rng.choice(SUBJECTS))


@functools.cache
def python_passages() -> tuple[str, ...]:
    """Paragraphs of this Python's own documentation, always in the same order."""
    return tuple(passage for text in _python_texts() for passage in _passages(text))


def _python_texts() -> Iterator[str]:
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    """Of a module, its classes and functions; nothing where it cannot be read."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield text


def _passages(text: str) -> Iterator[str]:
    """Neighbouring paragraphs, joined until they are long enough."""
    passage = ""
    for paragraph in textwrap.dedent(text).split("\n\n"):
        passage = f"{passage}\n\n{paragraph.strip()}".strip()
        if len(passage) >= MIN_PASSAGE_CHARS:
            yield passage[:MAX_PASSAGE_CHARS]
            passage = ""
