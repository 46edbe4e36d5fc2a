"""Every family answers with drafts, right and wrong ones, token for token as transformers does, in float32.

Scheduler, ledger and workers are the real ones; ledgers are audited after every step.
"""

import dataclasses
from pathlib import Path

import pytest
from support.known_drafts import KnownDrafts
from support.local_engine import EngineOptions, LocalEngine, make_request, nan_memory, start_worker
from support.local_pair import DECODE, LocalPair
from support.parity_cases import NAMES, WORKLOAD
from support.parity_table import RecordCell
from support.speculation_cases import MARKS, SpeculationCase, all_cases, ngram, quick_cases
from support.thread_ranks import ThreadRanks
from support.tiny_families import FAMILIES, build, make_prompt, reference_tokens

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.request import Request, SamplingParams
from blockferry.engine.scheduler.instance import Instance

pytestmark = pytest.mark.slow
OPTIONS = EngineOptions(max_model_len=128, speculation=ngram())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The whole array takes seconds to choose, which nobody should wait for who leaves it out."""
    if "case" not in metafunc.fixturenames:
        return
    if metafunc.function is test_every_family_answers_as_without_drafts:
        made = quick_cases()
    else:
        made = [] if "not full" in metafunc.config.option.markexpr else all_cases()
    metafunc.parametrize("case", made, ids=[case.name for case in made])


def num_accepted(instance: Instance) -> int:
    counters = instance.speculation.counters()
    assert counters is not None
    return counters.num_accepted


def check(case: SpeculationCase, families_folder: Path, record_cell: RecordCell) -> None:
    """Cold, then warm; every block is free again afterwards."""
    path = build(FAMILIES[case.family], families_folder)
    options, workload = case.sized(path), case.workload
    engine = LocalEngine(path, options, start_worker(path, options, make_proposer=case.proposer(path)))

    assert engine.generate(workload.prompts, workload.num_output) == workload.expected(path)
    assert engine.generate(workload.prompts, workload.num_output) == workload.expected(path)

    stats = engine.kv.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if case.drafts == "known":
        assert num_accepted(engine.instance) > 0
    record_cell(case.family, "drafts")


def test_every_family_answers_as_without_drafts(
    case: SpeculationCase, families_folder: Path, record_cell: RecordCell
) -> None:
    check(case, families_folder, record_cell)


@pytest.mark.full
def test_every_pair_of_choices_answers_as_without_drafts(
    case: SpeculationCase, families_folder: Path, record_cell: RecordCell
) -> None:
    check(case, families_folder, record_cell)


QUICK_PAIRS = [("llama", TransferMode.PUSH), ("gemma3_text", TransferMode.PULL), ("jamba", TransferMode.PUSH)]
PAIRS = [
    pytest.param(name, mode, marks=[] if (name, mode) in QUICK_PAIRS else [pytest.mark.full])
    for name in NAMES
    for mode in TransferMode
]


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_handed_over_sequence_continues_with_drafts(name: str, mode: TransferMode, families_folder: Path) -> None:
    path = build(FAMILIES[name], families_folder)
    overlap = Overlap.LAYERS if mode is TransferMode.PUSH else Overlap.NONE
    proposer = KnownDrafts(WORKLOAD.sequences(path), MARKS).of
    pair = LocalPair(path, OPTIONS, mode=mode, overlap=overlap, make_proposer=proposer)
    try:
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    finally:
        pair.close()

    assert num_accepted(pair.instances[DECODE]) > 0
    for ledger in pair.ledgers.values():
        assert ledger.stats().num_free_blocks == ledger.stats().num_blocks


SHAPES = {"TP 2": {"tp_size": 2}, "PP 2": {"pp_size": 2}}
QUICK_SHAPES = [("llama4_text", "TP 2"), ("deepseek_v3", "PP 2"), ("qwen3_next", "TP 2")]
RANKS = [
    pytest.param(name, shape, marks=[] if (name, shape) in QUICK_SHAPES else [pytest.mark.full])
    for name in NAMES
    for shape in SHAPES
]


@pytest.mark.parametrize(("name", "shape"), RANKS)
def test_several_ranks_answer_with_drafts(name: str, shape: str, families_folder: Path) -> None:
    path = build(FAMILIES[name], families_folder)
    options = EngineOptions(max_model_len=128, speculation=ngram(), **SHAPES[shape])
    ranks = ThreadRanks(path, options, make_proposer=KnownDrafts(WORKLOAD.sequences(path), MARKS).of)
    try:
        ranks.each(lambda worker: worker.init_cache(options.plan(path), nan_memory))
        engine = LocalEngine(path, options, ranks)
        assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    finally:
        ranks.close()

    assert num_accepted(engine.instance) > 0


WAYS = (
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.2, num_logprobs=3),
    SamplingParams(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4, num_logprobs=0),
    SamplingParams(temperature=0.8, min_tokens=15, stop_token_ids=tuple(range(3, 100)), num_prompt_logprobs=2),
    SamplingParams(temperature=0.7, top_k=50, logit_bias={7: 3.0, 8: -5.0}, num_logprobs=2),
)


def random_requests() -> list[Request]:
    """One of every way to draw."""
    requests = []
    for number, way in enumerate(WAYS):
        request = make_request(number + 1, make_prompt(number, 12 + 9 * number), 30)
        sampling = dataclasses.replace(way, seed=number, max_tokens=30)
        requests.append(dataclasses.replace(request, sampling=sampling))
    return requests


def logprobs_of(engine: LocalEngine) -> list[tuple[int, bool, int, list[int]]]:
    """(handle, whether of the prompt, position, token ids) of every entry."""
    return [
        (handle, part.is_prompt, part.first_position + place, entry.token_ids.tolist())
        for handle, parts in sorted(engine.logprobs.items())
        for part in parts
        for place, entry in enumerate(part.entries)
    ]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama4_text", "deepseek_v3", "falcon_h1"])
def test_whatever_is_drawn_is_drawn_with_drafts_too(name: str, families_folder: Path) -> None:
    path = build(FAMILIES[name], families_folder)
    plain_options = dataclasses.replace(OPTIONS, speculation=None)
    plain = LocalEngine(path, plain_options, start_worker(path, plain_options))
    expected = plain.run(random_requests())
    sequences = [[*one.prompt_token_ids.tolist(), *more] for one, more in zip(random_requests(), expected, strict=True)]
    drafts = KnownDrafts(sequences, MARKS)
    engine = LocalEngine(path, OPTIONS, start_worker(path, OPTIONS, make_proposer=drafts.of))

    assert engine.run(random_requests()) == expected
    assert logprobs_of(engine) == logprobs_of(plain)
    assert num_accepted(engine.instance) > 40


@pytest.mark.parametrize("num_output", range(1, 9))
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_max_tokens_and_a_stop_token_end_a_request_amid_accepted_drafts(
    name: str, num_output: int, families_folder: Path
) -> None:
    path = build(FAMILIES[name], families_folder)
    drafts = KnownDrafts(WORKLOAD.sequences(path), [True])
    engine = LocalEngine(path, OPTIONS, start_worker(path, OPTIONS, make_proposer=drafts.of))
    expected = [one[:num_output] for one in WORKLOAD.expected(path)]
    stopping = [
        dataclasses.replace(
            make_request(engine.next_handle(), prompt, WORKLOAD.num_output),
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=20, stop_token_ids=(answer[-1],)),
        )
        for prompt, answer in zip(WORKLOAD.prompts, expected, strict=True)
    ]

    assert engine.generate(WORKLOAD.prompts, num_output) == expected
    assert engine.run(stopping) == [one[: 1 + one.index(one[-1])] for one in expected]
    assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
    assert engine.kv.stats().num_free_blocks == engine.kv.stats().num_blocks


def test_an_encoder_decoder_answers_with_drafts(families_folder: Path, record_cell: RecordCell) -> None:
    path = build(FAMILIES["bart"], families_folder)
    inputs = [make_prompt(seed, length) for seed, length in enumerate((5, 70, 33, 300))]
    expected = [reference_tokens(path, one, 20) for one in inputs]
    options = dataclasses.replace(OPTIONS, speculation=ngram(is_adaptive=False))
    engine = LocalEngine(path, options, start_worker(path, options))

    assert engine.generate([[2]] * len(inputs), 20, encoder_inputs=inputs) == expected
    counters = engine.instance.speculation.counters()
    assert counters is not None
    assert counters.num_drafted > 0
    record_cell("bart", "drafts")


@pytest.mark.parametrize("name", ["llama", "llama4_text", "jamba"])
def test_drafts_end_where_the_longest_sequence_ends(name: str, families_folder: Path) -> None:
    path = build(FAMILIES[name], families_folder)
    prompts = [make_prompt(70 + number, 76 + 5 * number) for number in range(4)]
    expected = [reference_tokens(path, prompt, 96 - len(prompt)) for prompt in prompts]
    sequences = [[*prompt, *more] for prompt, more in zip(prompts, expected, strict=True)]
    options = dataclasses.replace(OPTIONS, max_model_len=96)
    engine = LocalEngine(path, options, start_worker(path, options, make_proposer=KnownDrafts(sequences, [True]).of))
    requests = [
        make_request(engine.next_handle(), prompt, len(more)) for prompt, more in zip(prompts, expected, strict=True)
    ]

    assert engine.run(requests) == expected
    assert engine.kv.stats().num_free_blocks == engine.kv.stats().num_blocks
