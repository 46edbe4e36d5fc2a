"""An encoder-decoder continues token for token as transformers does, in float32: cross attention over pages of its own.

Scheduler, ledger and workers are the real ones; ledgers are audited after every step.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dense_step import dense_logits
from support.family_ranks import RankCase, execute_cases
from support.local_engine import EngineOptions, LocalEngine, start_worker
from support.local_pair import LocalPair
from support.local_tiers import TieredEngine
from support.parity_cases import smallest_pool
from support.parity_table import RecordCell
from support.rank_processes import run_ranks
from support.tiny_families import FAMILIES, build, load_reference, make_prompt, one_thread, reference_logits

from blockferry.connectors.base import TransferMode
from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.kv.plan import Planner
from blockferry.engine.wire import StepPlan, StepResult

START = 2  # the tiny model's decoder_start_token_id
NUM_OUTPUT = 24
INPUT_LENGTHS = (5, 70, 33, 300)
INPUTS = tuple(make_prompt(seed, length) for seed, length in enumerate(INPUT_LENGTHS))
NGRAMS = SpeculationConfig(method=DraftMethod.NGRAM, min_ngram=1, is_adaptive=False)
PREFIX = [START, *make_prompt(9, 39)]  # a decoder's prompt of more than two blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILIES["bart"], tmp_path_factory.getbasetemp() / "tiny_families")


def start(path: Path, options: EngineOptions) -> LocalEngine:
    return LocalEngine(path, options, start_worker(path, options))


@torch.inference_mode()
def expected(path: Path, encoder_ids: Sequence[int], decoder_ids: Sequence[int] = (START,)) -> list[int]:
    """transformers' continuation of a decoder's prompt."""
    with one_thread():
        output = load_reference(path).generate(
            torch.tensor([list(encoder_ids)]),
            attention_mask=torch.ones(1, len(encoder_ids), dtype=torch.int64),
            decoder_input_ids=torch.tensor([list(decoder_ids)]),
            do_sample=False,
            num_beams=1,
            max_new_tokens=NUM_OUTPUT,
        )
    tokens: list[int] = output[0].tolist()
    assert tokens[: len(decoder_ids)] == list(decoder_ids)
    return tokens[len(decoder_ids) :]


def run(engine: LocalEngine, inputs: Sequence[Sequence[int]], prompt: Sequence[int] = (START,)) -> list[list[int]]:
    return engine.generate([prompt] * len(inputs), NUM_OUTPUT, encoder_inputs=inputs)


def assert_all_free(engine: LocalEngine) -> None:
    stats = engine.kv.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_inputs_differ_in_what_follows(path: Path) -> None:
    """Else the tests below would show little."""
    outputs = [tuple(expected(path, one)) for one in INPUTS]
    assert len(set(outputs)) == len(outputs)
    assert len(set(outputs[1])) > 3


@pytest.mark.parametrize(
    ("planner", "layout", "block_size"),
    [
        (None, "BHLNC", None),
        (Planner.UNIFORM, "BLHNC", 32),
        (Planner.UNIFORM, "LBNHC", 8),
        (Planner.UNIFORM, "LBHNC", 16),
        (Planner.SLAB, "BHLNC", 8),
        (Planner.SLAB, "BLHNC", None),
    ],
)
def test_requests_together_continue_as_transformers_does(
    path: Path, planner: Planner | None, layout: str, block_size: int | None, record_cell: RecordCell
) -> None:
    engine = start(path, EngineOptions(max_model_len=64, planner=planner, layout=layout, block_size=block_size))
    assert run(engine, INPUTS) == [expected(path, one) for one in INPUTS]
    assert_all_free(engine)
    if planner is not None:
        record_cell("bart", f"{planner} plan")
    if layout.startswith("L"):
        record_cell("bart", "layers outermost")


@pytest.mark.parametrize("chunk", [8, 17, 128])
def test_decoder_prompts_in_chunks_continue_as_transformers_does(
    path: Path, chunk: int, record_cell: RecordCell
) -> None:
    engine = start(path, EngineOptions(max_model_len=128, max_num_batched_tokens=chunk))
    assert run(engine, INPUTS, PREFIX) == [expected(path, one, PREFIX) for one in INPUTS]
    assert_all_free(engine)
    record_cell("bart", "chunked prompts")


def test_warm_worker_continues_as_transformers_does(path: Path) -> None:
    options = EngineOptions(max_model_len=64)
    worker = start_worker(path, options)
    worker.warm_up()
    engine = LocalEngine(path, options, worker)
    assert run(engine, INPUTS) == [expected(path, one) for one in INPUTS]


def test_preempted_requests_continue_as_transformers_does(path: Path, record_cell: RecordCell) -> None:
    inputs = [make_prompt(20 + seed, 16) for seed in range(24)]
    # one sequence with the longest of inputs; the 24 here are admitted with 3 blocks each and grow to 6
    options = EngineOptions(
        max_model_len=64, block_size=8, num_blocks=1 + 64 + 8, max_rows=24, max_num_batched_tokens=512
    )
    engine = start(path, options)
    assert run(engine, inputs) == [expected(path, one) for one in inputs]
    assert engine.instance.num_preemptions > 0
    assert_all_free(engine)
    record_cell("bart", "preemption")


@pytest.mark.parametrize("prompt", [[START], PREFIX], ids=["start", "prefix"])
def test_requests_with_ngram_drafts_continue_as_transformers_does(path: Path, prompt: list[int]) -> None:
    engine = start(path, EngineOptions(max_model_len=128, block_size=8, speculation=NGRAMS))
    assert run(engine, INPUTS, prompt) == [expected(path, one, prompt) for one in INPUTS]
    counters = engine.instance.speculation.counters()
    assert counters is not None
    assert 0 < counters.num_accepted < counters.num_drafted
    assert_all_free(engine)


def test_equal_decoder_prompts_share_no_blocks_where_encoder_inputs_differ(path: Path) -> None:
    engine = start(path, EngineOptions(max_model_len=128))
    for encoder_input in INPUTS[1:]:
        assert run(engine, [encoder_input], PREFIX) == [expected(path, encoder_input, PREFIX)]
    assert engine.kv.stats().num_hit_tokens == 0


def test_same_request_again_finds_its_decoders_blocks(path: Path, record_cell: RecordCell) -> None:
    engine = start(path, EngineOptions(max_model_len=128))
    first = run(engine, INPUTS, PREFIX)
    assert engine.kv.stats().num_hit_tokens == 0
    assert run(engine, INPUTS, PREFIX) == first == [expected(path, one, PREFIX) for one in INPUTS]
    assert engine.kv.stats().num_hit_tokens == len(INPUTS) * (len(PREFIX) // 16 * 16)
    assert_all_free(engine)
    record_cell("bart", "cold and warm cache")


def test_tokens_are_the_same_after_some_of_the_decoders_blocks_were_evicted(
    path: Path, record_cell: RecordCell
) -> None:
    engine = start(path, EngineOptions(max_model_len=128))
    answers = [expected(path, one, PREFIX) for one in INPUTS]
    assert run(engine, INPUTS, PREFIX) == answers
    engine.kv.evict_blocks(np.arange(3, engine.plan.ledger.num_blocks, 3, dtype=np.int32))
    assert run(engine, INPUTS, PREFIX) == answers
    assert 0 < engine.kv.stats().num_hit_tokens < len(INPUTS) * (len(PREFIX) // 16 * 16)
    record_cell("bart", "part evicted")


def test_uncached_requests_continue_as_transformers_does(path: Path) -> None:
    engine = start(path, EngineOptions(max_model_len=128, enable_caching=False))
    for _ in range(2):
        assert run(engine, INPUTS, PREFIX) == [expected(path, one, PREFIX) for one in INPUTS]
    assert_all_free(engine)


@pytest.mark.parametrize("mode", list(TransferMode))
def test_handed_over_requests_continue_without_encoding_again(
    path: Path, mode: TransferMode, record_cell: RecordCell
) -> None:
    pair = LocalPair(path, EngineOptions(max_model_len=128), mode=mode)
    try:
        for prompt in ([START], PREFIX, PREFIX):
            outputs = pair.generate([prompt] * len(INPUTS), NUM_OUTPUT, encoder_inputs=INPUTS)
            assert outputs == [expected(path, one, prompt) for one in INPUTS]
    finally:
        pair.close()
    num_input_bytes = 3 * sum(INPUT_LENGTHS) * 3 * 2 * 64 * 4  # rounds, tokens, layers, keys and values, float32
    assert pair.num_ferried_bytes > num_input_bytes
    for kv in pair.ledgers.values():
        assert kv.stats().num_free_blocks == kv.stats().num_blocks
    record_cell("bart", f"P/D {mode}")


def test_handed_over_requests_with_ngram_drafts_continue_as_transformers_does(path: Path) -> None:
    pair = LocalPair(path, EngineOptions(max_model_len=128, speculation=NGRAMS), mode=TransferMode.PUSH)
    try:
        outputs = pair.generate([PREFIX] * len(INPUTS), NUM_OUTPUT, encoder_inputs=INPUTS)
    finally:
        pair.close()
    assert outputs == [expected(path, one, PREFIX) for one in INPUTS]


@pytest.mark.parametrize("shape", [{"tp_size": 2, "block_size": 32}, {"pp_size": 3, "layout": "LBNHC"}])
@pytest.mark.parametrize("mode", list(TransferMode))
def test_sides_of_other_shapes_hand_over_what_cross_attention_reads(
    path: Path, mode: TransferMode, shape: dict[str, Any], record_cell: RecordCell
) -> None:
    pair = LocalPair(path, EngineOptions(max_model_len=128), EngineOptions(max_model_len=128, **shape), mode=mode)
    try:
        for prompt in ([START], PREFIX, PREFIX):
            outputs = pair.generate([prompt] * len(INPUTS), NUM_OUTPUT, encoder_inputs=INPUTS)
            assert outputs == [expected(path, one, prompt) for one in INPUTS]
    finally:
        pair.close()
    record_cell("bart", "P/D unequal sides")


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_ranks_that_share_heads_compute_transformers_logits(path: Path, tp_size: int) -> None:
    logits = dense_logits(path, PREFIX, tp_size=tp_size, encoder_ids=INPUTS[1])
    wanted = reference_logits(path, PREFIX, encoder_ids=INPUTS[1])
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=2e-3)  # norms after every sum amplify rounding


def test_scaled_embeddings_and_a_bias_of_logits_count(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "scaled"
    shutil.copytree(path, other)
    tensors = load_file(other / "model.safetensors")
    tensors["final_logits_bias"] = torch.linspace(-3, 3, 192)[None]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text()) | {"scale_embedding": True}
    (other / "config.json").write_text(json.dumps(config))
    logits = dense_logits(other, PREFIX, tp_size=2, encoder_ids=INPUTS[1])
    wanted = reference_logits(other, PREFIX, encoder_ids=INPUTS[1])
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=2e-3)
    assert (logits - dense_logits(path, PREFIX, encoder_ids=INPUTS[1])).abs().max() > 1


class EncoderOracle:
    """Says what a model would sample: rows are told apart by what their encoder reads."""

    def __init__(self, sequences: dict[tuple[int, ...], list[int]]) -> None:
        """sequences: the decoder's prompt with its continuation, by the encoder's input."""
        self._sequences = sequences
        self._of_row: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for new_row in plan.new_rows:
            assert new_row.encoder_token_ids is not None
            self._of_row[new_row.row] = self._sequences[tuple(new_row.encoder_token_ids.tolist())]
        ends = (plan.num_computed + plan.num_scheduled)[plan.sample].tolist()
        tokens = [self._of_row[row][end] for row, end in zip(plan.rows[plan.sample].tolist(), ends, strict=True)]
        return StepResult(step_id=plan.step_id, token_ids=np.array(tokens, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (1, 3)])
def test_ranks_in_processes_sample_what_transformers_does(
    path: Path, tmp_path: Path, tp_size: int, pp_size: int, record_cell: RecordCell
) -> None:
    options = EngineOptions(max_model_len=128, tp_size=tp_size, pp_size=pp_size)
    sequences = {tuple(one): [*PREFIX, *expected(path, one, PREFIX)] for one in INPUTS}
    engine = LocalEngine(path, options, EncoderOracle(sequences))
    run(engine, INPUTS, PREFIX)
    case = RankCase(path=path, options=options, plans=[plan for plan, _ in engine.steps])

    ranks = run_ranks(options.worker_spec(path), tmp_path / "meet", execute_cases, [case])

    sampled = next(rank for rank in reversed(ranks) if rank[0])
    assert sampled[0] == [result.token_ids.tolist() for _, result in engine.steps]
    record_cell("bart", "TP 2" if tp_size == 2 else "PP 2")


@pytest.mark.parametrize("planner", [Planner.UNIFORM, Planner.SLAB])
def test_decoders_prefixes_come_back_from_memory(
    path: Path, planner: Planner, tmp_path: Path, record_cell: RecordCell
) -> None:
    """What depends on the encoder's input is found for that input alone; its own states are computed anew."""
    options = smallest_pool(EngineOptions(max_model_len=128, planner=planner), path)
    inputs = [make_prompt(40 + seed, 30 + seed) for seed in range(16)]
    engine = TieredEngine(path, options, folder=tmp_path)
    try:
        for _ in range(2):
            for encoder_input in inputs:
                assert run(engine, [encoder_input], PREFIX) == [expected(path, encoder_input, PREFIX)]
                engine.settle()
        assert engine.tiers.status()["num_loaded_tokens"] > 0
        assert_all_free(engine)
        record_cell("bart", "offload")
    finally:
        engine.close()
