"""What a worker proposes from its modules is what they draft of each row alone, however its tokens were computed."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.draft_driver import DraftDriver, Drafts, Generated, no_drafts
from support.local_engine import EngineOptions, start_worker
from support.marks import full
from support.ngrams import naive_lookup
from support.tiny_families import VOCAB_SIZE, make_prompt, one_thread
from support.tiny_mtp import MtpCheckpoint, build_mtp, oracle_of

from blockferry.connectors.compute_progress import StepMark
from blockferry.engine.kv.plan import Planner
from blockferry.engine.request import SamplingParams
from blockferry.engine.spec_decode.base import VerifiedStep
from blockferry.engine.wire import NO_DRAFT
from blockferry.engine.worker import proposers
from blockferry.engine.worker.proposers import ProposerParts, make_proposer

PROMPTS = [make_prompt(seed, length) for seed, length in ((1, 3), (2, 37), (3, 1), (4, 20))]
NUM_OUTPUT = 12
NUM_PROPOSALS = 3
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_OUTPUT)
OPTIONS = EngineOptions(max_model_len=96, memory_bytes=1 << 23, block_size=8, planner=Planner.UNIFORM)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def generate(
    checkpoint: MtpCheckpoint,
    drafts: Drafts = no_drafts,
    *,
    chunk: int = 16,
    num_proposals: int = NUM_PROPOSALS,
    max_model_len: int = OPTIONS.max_model_len,
    **changes: object,
) -> list[Generated]:
    """All prompts together, each step's proposals kept. changes: of the speculation."""
    speculation = dataclasses.replace(checkpoint.speculation(num_proposals), **changes)  # type: ignore[arg-type]  # names and types are the tests'
    options = dataclasses.replace(OPTIONS, speculation=speculation, max_model_len=max_model_len)
    worker = start_worker(checkpoint.path, options)
    driver = DraftDriver(worker, options.plan(checkpoint.path).ledger, chunk=chunk, num_proposals=num_proposals)
    try:
        return driver.run(PROMPTS, [GREEDY] * len(PROMPTS), drafts, num_output=NUM_OUTPUT)
    finally:
        worker.close()


Propose = Callable[[list[int]], list[int]]


def assert_proposals_are(expected: Propose, made: list[Generated]) -> None:
    for one in made:
        num_known = one.num_prompt_tokens
        for count, proposed in zip(one.steps, one.proposals, strict=True):
            num_known += count
            assert proposed == expected(one.known[:num_known]), (one.row, num_known)


def assert_proposals_are_the_oracles(checkpoint: MtpCheckpoint, made: list[Generated]) -> None:
    assert_proposals_are(lambda known: oracle_of(checkpoint).drafts(known, NUM_PROPOSALS), made)


def likely_drafts(checkpoint: MtpCheckpoint, known: list[int], min_chance: float) -> list[int]:
    """The oracle's, each only where all before it hold with that chance."""
    chances = oracle_of(checkpoint).logits(known, NUM_PROPOSALS).softmax(-1).amax(-1).cumprod(0)
    num_likely = 1 + int((chances[:-1] >= min_chance).sum())
    return oracle_of(checkpoint).drafts(known, num_likely)


def follow(made: list[Generated], num_right: int) -> Drafts:
    """Three drafts a step, of which the first few are what really follows."""

    def drafts(number: int, known: list[int]) -> list[int]:
        following = made[number].known[len(known) : len(known) + NUM_PROPOSALS]
        return [token if place < num_right else (token + 1) % VOCAB_SIZE for place, token in enumerate(following)]

    return drafts


@pytest.mark.parametrize("family", ["llama", "qwen3_next", *full("deepseek_v3", "qwen3_5")])
def test_plain_steps_propose_what_the_modules_draft(family: str, folder: Path) -> None:
    checkpoint = build_mtp(family, folder)
    assert_proposals_are_the_oracles(checkpoint, generate(checkpoint))


@pytest.mark.parametrize("num_modules", [1, 3, *full(2, 4)])
@pytest.mark.parametrize("num_right", [1, *full(0, 3)])
def test_verified_and_rejected_drafts_leave_no_trace(num_modules: int, num_right: int, folder: Path) -> None:
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=num_modules)
    plain = generate(checkpoint)
    made = generate(checkpoint, follow(plain, num_right))
    assert [one.known for one in made] == [one.known for one in plain]
    assert_proposals_are_the_oracles(checkpoint, made)


@pytest.mark.parametrize("chunk", [1, *full(7)])
@pytest.mark.parametrize("num_modules", [1, 3])
def test_prompts_in_chunks_are_drafted_for_alike(chunk: int, num_modules: int, folder: Path) -> None:
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=num_modules)
    assert_proposals_are_the_oracles(checkpoint, generate(checkpoint, chunk=chunk))


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize(("min_chance", "lengths"), [(0.06, {1, 2}), (0.01, {2, 3})])
def test_no_draft_is_made_behind_unlikely_ones(
    num_modules: int, min_chance: float, lengths: set[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposers, "CONFIDENCE", min_chance)
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=num_modules)
    made = generate(checkpoint, is_adaptive=True)
    assert_proposals_are(lambda known: likely_drafts(checkpoint, known, min_chance), made)
    assert {len(proposed) for one in made for proposed in one.proposals} == lengths


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize("num_right", [None, 1])
def test_modules_draft_where_nothing_recurs(num_modules: int, num_right: int | None, folder: Path) -> None:
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=num_modules)
    drafts = no_drafts if num_right is None else follow(generate(checkpoint), num_right)
    made = generate(checkpoint, drafts, looks_up=True, min_ngram=1, max_ngram=2)
    num_found = 0

    def expected(known: list[int]) -> list[int]:
        nonlocal num_found
        found = naive_lookup(known, min_ngram=1, max_ngram=2, num_drafts=NUM_PROPOSALS)
        num_found += found[0] != NO_DRAFT
        return found if found[0] != NO_DRAFT else oracle_of(checkpoint).drafts(known, NUM_PROPOSALS)

    assert_proposals_are(expected, made)
    assert 0 < num_found < sum(len(one.proposals) for one in made)


def test_a_shortlist_is_all_that_is_proposed(folder: Path) -> None:
    checkpoint = build_mtp("llama", folder, shortlist=range(20, 60))
    made = generate(checkpoint)
    assert {token for one in made for proposed in one.proposals for token in proposed} <= set(range(20, 60))
    assert_proposals_are_the_oracles(checkpoint, made)


def test_drafts_end_with_the_longest_sequence(folder: Path) -> None:
    checkpoint = build_mtp("deepseek_v3", folder, num_modules=3)
    longest = max(map(len, PROMPTS)) + NUM_OUTPUT
    made = generate(checkpoint, num_proposals=5, max_model_len=longest)
    assert {len(proposed) for one in made for proposed in one.proposals} == {5}


def test_layers_of_modules_are_done_with_the_step_and_not_before(folder: Path) -> None:
    checkpoint, seen = build_mtp("deepseek_v3", folder), []
    options = dataclasses.replace(OPTIONS, speculation=checkpoint.speculation(1))
    plan = options.plan(checkpoint.path)
    (draft_id,) = plan.model.draft_layer_ids

    class Watched:
        def __init__(self, parts: ProposerParts) -> None:
            self._proposer = make_proposer(parts)

        def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
            drafts = self._proposer.propose(step)
            marks = (StepMark(step.plan.step_id, draft_id - 1), StepMark(step.plan.step_id, draft_id))
            seen.append([worker.progress.has_reached(mark) for mark in marks])
            return drafts

    worker = start_worker(checkpoint.path, options, make_proposer=Watched)
    DraftDriver(worker, plan.ledger, chunk=16).run(PROMPTS[:1], [GREEDY], num_output=2)
    worker.close()
    assert seen == [[True, False]] * 2
