"""The sampler against naive oracles: one row at a time, plain Python arithmetic."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from blockferry.engine.request import SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import NewRow
from blockferry.engine.worker import sampler
from blockferry.engine.worker.draws import uniforms
from blockferry.engine.worker.logits import edit_logits
from blockferry.engine.worker.logprobs import token_logprobs
from blockferry.engine.worker.sampling_state import SamplingState

VOCAB = 1500  # more than NUM_CANDIDATES


class Bench:
    """Rows with parameters and tokens; samples them in any batch."""

    def __init__(self, max_rows: int = 16) -> None:
        self.state = SamplingState(max_rows)
        self.table = RowTable(max_rows=max_rows, max_model_len=64)

    def add(self, row: int, sampling: SamplingParams, *, prompt: list[int], output: list[int] | None = None) -> None:
        tokens = np.array(prompt + (output or []), np.int32)
        self.table.assign(row, tokens, num_prompt_tokens=len(prompt))
        self.state.assign(NewRow(row=row, token_ids=tokens, num_prompt_tokens=len(prompt), sampling=sampling))

    def sample(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        row_ids = np.array(rows, np.int32)
        tokens = sampler.sample(logits, row_ids, self.table.num_tokens[row_ids], state=self.state, table=self.table)
        assert tokens.dtype == np.int32
        return tokens.tolist()


def random_logits(num_rows: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def naive_distribution(logits: list[float], sampling: SamplingParams) -> dict[int, float]:
    """Token -> probability after temperature, min-p, top-k, top-p."""
    best = max(logits)
    weights = {i: math.exp((x - best) / sampling.temperature) for i, x in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= sampling.min_p}
    ordered = sorted(weights, key=lambda i: (-weights[i], i))
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    total = sum(weights[i] for i in ordered)
    kept, mass = [], 0.0
    for i in ordered:
        if kept and mass >= sampling.top_p * total and sampling.top_p < 1.0:
            break
        kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def test_greedy_takes_the_best_token_and_the_lowest_among_equals() -> None:
    bench = Bench()
    for row in range(3):
        bench.add(row, SamplingParams(temperature=0.0, seed=row), prompt=[1])
    logits = random_logits(3)
    logits[1, 7] = logits[1, 400] = 50.0

    assert bench.sample(logits, [0, 1, 2]) == [int(logits[0].argmax()), 7, int(logits[2].argmax())]
    assert bench.sample(logits.bfloat16(), [0, 1, 2])[1] == 7


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"top_p": 0.97},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 600, "top_p": 0.99, "min_p": 1e-4},
    {"min_p": 0.02, "top_p": 0.7},
]


@pytest.mark.parametrize("scale", [0.2, 3.0])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_stay_within_the_filtered_set_and_follow_its_probabilities(
    options: dict[str, float], scale: float
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=0, **options)  # type: ignore[arg-type]  # mixed values
    logits = random_logits(1, seed=4, scale=scale)
    expected = naive_distribution(logits[0].double().tolist(), sampling)
    num_draws = 2000
    bench = Bench(max_rows=num_draws)
    for row in range(num_draws):
        bench.add(row, SamplingParams(temperature=0.8, seed=row, **options), prompt=[1, 2])  # type: ignore[arg-type]

    counts = Counter(bench.sample(logits.expand(num_draws, -1).contiguous(), list(range(num_draws))))

    # the cut may fall one token further where float32 sums differ from exact ones
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        spread = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) <= 5 * spread + 1


def test_a_draw_depends_on_seed_and_position_not_on_the_batch() -> None:
    bench = Bench()
    rng = random.Random(2)
    for row in range(16):
        options = rng.choice(FILTERS)
        temperature = rng.choice([0.0, 0.7, 1.3])
        sampling = SamplingParams(temperature=temperature, seed=row % 4, **options)  # type: ignore[arg-type]
        bench.add(row, sampling, prompt=[1] * rng.randrange(1, 9))
    logits = random_logits(16, seed=9)
    together = bench.sample(logits, list(range(16)))

    alone = [bench.sample(logits[row : row + 1], [row])[0] for row in range(16)]
    order = rng.sample(range(16), 16)

    assert alone == together
    assert bench.sample(logits[order], order) == [together[row] for row in order]


def test_the_best_candidates_are_those_of_a_stable_sort_even_among_equals() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(3, 20_011, generator=generator).mul(500).round().div(500)

    best = sampler._best(weights, sampler.NUM_CANDIDATES)

    expected = weights.sort(dim=-1, descending=True, stable=True).indices[:, : sampler.NUM_CANDIDATES]
    assert torch.equal(best, expected)


def test_other_seeds_and_positions_draw_other_numbers_evenly() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.int32), 100)

    draws = uniforms(seeds, positions)

    assert len(np.unique(draws)) == len(draws)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 100  # chi-square, 49 degrees of freedom
    assert abs(np.corrcoef(draws.reshape(100, 100)[:-1].ravel(), draws.reshape(100, 100)[1:].ravel())[0, 1]) < 0.05


def naive_edit(logits: list[float], sampling: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    edited = list(logits)
    for token, bias in sampling.logit_bias.items():
        if token < len(edited):
            edited[token] += bias
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids[:2]:
            edited[token] = -math.inf
    counts = Counter(output)
    for token in set(prompt + output):
        edited[token] *= 1 / sampling.repetition_penalty if edited[token] > 0 else sampling.repetition_penalty
    for token, count in counts.items():
        edited[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return edited


EDITS = [
    SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, seed=0, presence_penalty=2.5),
    SamplingParams(temperature=0.0, seed=0, frequency_penalty=-1.2, repetition_penalty=0.8),
    SamplingParams(temperature=0.0, seed=0, logit_bias={3: 100.0, 8: -100.0, VOCAB + 5: 1.0}),
    SamplingParams(temperature=0.0, seed=0, min_tokens=4, stop_token_ids=(2, 9, VOCAB)),
    SamplingParams(temperature=0.0, seed=0, min_tokens=3, stop_token_ids=(2, 9)),
    SamplingParams(temperature=0.0, seed=0),
]


def test_edits_follow_each_rows_own_prompt_and_output() -> None:
    bench, rng = Bench(), random.Random(1)
    logits = random_logits(len(EDITS), seed=3)
    texts = [([rng.randrange(12) for _ in range(5 + row)], [rng.randrange(12) for _ in range(3)]) for row in range(7)]
    for row, (sampling, (prompt, output)) in enumerate(zip(EDITS, texts, strict=True)):
        bench.add(row, sampling, prompt=prompt, output=output)
    edited = logits.clone()

    rows = np.arange(len(EDITS), dtype=np.int32)
    edit_logits(edited, rows, bench.table.num_tokens[rows], state=bench.state, table=bench.table)

    for row, (sampling, (prompt, output)) in enumerate(zip(EDITS, texts, strict=True)):
        expected = naive_edit(logits[row].tolist(), sampling, prompt, output)
        np.testing.assert_allclose(edited[row].numpy(), np.array(expected, np.float32), rtol=1e-5, atol=1e-5)


def test_sampling_leaves_the_logits_untouched_for_logprobs() -> None:
    bench = Bench()
    bench.add(0, SamplingParams(temperature=0.9, seed=0, repetition_penalty=2.0, top_p=0.5), prompt=[1])
    logits = random_logits(1)
    before = logits.clone()

    bench.sample(logits, [0])

    assert torch.equal(logits, before)


def test_a_banned_token_is_never_drawn() -> None:
    bench = Bench()
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, [2, 9, 11]] = 10.0
    for seed in range(50):
        bench.add(0, SamplingParams(temperature=1.0, seed=seed, min_tokens=1, stop_token_ids=(2, 9)), prompt=[1])
        assert bench.sample(logits, [0]) == [11]


def test_logprobs_list_the_token_itself_then_the_best() -> None:
    logits = random_logits(2)
    tokens = np.array([5, int(logits[1].argmax())], np.int32)

    first, second = token_logprobs(logits, tokens, np.array([0, 2], np.int32))

    expected = logits.log_softmax(-1)
    assert first.token_ids.tolist() == [5]
    assert first.rank == sorted(range(VOCAB), key=lambda i: -logits[0, i].item()).index(5) + 1
    assert second.rank == 1
    assert second.token_ids.tolist() == [tokens[1], *logits[1].topk(2).indices.tolist()]
    np.testing.assert_allclose(second.logprobs[1:], expected[1].topk(2).values, rtol=1e-6)
