"""SmolLM2 in float32 through Worker.execute alone: token for token what transformers says, on one rank and on two."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.checkpoints import load_reference, reference_logits
from support.parity import ParityPrompt, parity_prompts
from support.rank_processes import run_ranks
from support.worker_driver import (
    GREEDY,
    PlanMaker,
    execute_all,
    generate,
    outputs_by_row,
    plans_to_length,
    start_worker,
    worker_spec,
)

from blockferry.cluster.fetch import is_fetched, model_dir
from blockferry.engine.worker.spec import WorkerSpec

pytestmark = [pytest.mark.model, pytest.mark.slow]
MODEL = "smollm2-135m-instruct"
REDUCED = ("raw0", "raw3", "raw6", "raw8", "chat0", "prose300")


@pytest.fixture(scope="module")
def folder() -> Path:
    assert is_fetched(MODEL), f"run `blockferry fetch-model {MODEL}` before the tests that are marked `model`"
    return model_dir(MODEL)


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return load_reference(folder)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[ParityPrompt]:
    return parity_prompts(transformers.AutoTokenizer.from_pretrained(folder))


def smollm2_spec(folder: Path, **options: Any) -> WorkerSpec:
    limits: dict[str, Any] = {"max_model_len": 1664, "max_rows": 32, "max_num_batched_tokens": 8192}
    return worker_spec(folder, **(limits | options))


def check(model: transformers.PreTrainedModel, prompt: ParityPrompt, output: Sequence[int]) -> None:
    """Every output token is the reference's best after everything before it: so all are its greedy continuation."""
    assert output
    logits = reference_logits(model, [*prompt.token_ids, *output])
    assert logits[len(prompt.token_ids) - 1 : -1].argmax(-1).tolist() == list(output), prompt.name


def test_prompts_in_one_batch_continue_as_transformers_does(
    folder: Path, reference: transformers.PreTrainedModel, prompts: list[ParityPrompt]
) -> None:
    chosen = [prompt for prompt in prompts if prompt.name in REDUCED]
    worker = start_worker(smollm2_spec(folder), num_blocks=128)

    outputs = generate(worker, [prompt.token_ids for prompt in chosen], num_output=24, chunk=128)

    for prompt, output in zip(chosen, outputs, strict=True):
        check(reference, prompt, output)


@pytest.mark.full
def test_all_prompts_in_one_batch_continue_as_transformers_does(
    folder: Path, reference: transformers.PreTrainedModel, prompts: list[ParityPrompt]
) -> None:
    worker = start_worker(smollm2_spec(folder), num_blocks=700)

    outputs = generate(worker, [prompt.token_ids for prompt in prompts], num_output=48, chunk=128)

    for prompt, output in zip(prompts, outputs, strict=True):
        check(reference, prompt, output)


def test_nine_heads_on_two_ranks_continue_as_transformers_does(
    folder: Path, reference: transformers.PreTrainedModel, prompts: list[ParityPrompt], tmp_path: Path
) -> None:
    chosen = [prompt for prompt in prompts if prompt.name in REDUCED]
    maker = PlanMaker(num_blocks=128, block_size=16)
    sequences = [maker.start(row, prompt.token_ids, GREEDY) for row, prompt in enumerate(chosen)]
    plans = plans_to_length(maker, sequences, num_output=12, chunk=64)

    ranks = run_ranks(smollm2_spec(folder, tp_size=2), tmp_path / "meet", execute_all, plans, 128)

    assert [report.layout.num_heads for report in ranks] == [2, 1]
    outputs = outputs_by_row(plans, ranks[0].results)
    for row, prompt in enumerate(chosen):
        check(reference, prompt, outputs[row])
