"""SmolLM2 in float32 through Worker.execute alone: token for token what transformers says, on one rank and on two."""

from pathlib import Path

import pytest
from support.parity import ParityPrompt, Reference, parity_prompts
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
def reference() -> Reference:
    assert is_fetched(MODEL), f"run `blockferry fetch-model {MODEL}` before the tests that are marked `model`"
    return Reference(model_dir(MODEL))


def smollm2_spec(**options: object) -> WorkerSpec:
    limits = {"max_model_len": 1664, "max_rows": 32, "max_num_batched_tokens": 8192, "num_threads": 2}
    return worker_spec(model_dir(MODEL), **(limits | options))


def select(reference: Reference, names: tuple[str, ...]) -> list[ParityPrompt]:
    return [prompt for prompt in parity_prompts(reference.tokenizer) if prompt.name in names]


def check(reference: Reference, prompts: list[ParityPrompt], *, num_output: int) -> None:
    worker = start_worker(smollm2_spec(), num_blocks=700)

    outputs = generate(worker, [prompt.token_ids for prompt in prompts], num_output=num_output, chunk=128)

    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == reference.greedy(prompt.token_ids, num_tokens=num_output), prompt.name


def test_prompts_in_one_batch_continue_as_transformers_does(reference: Reference) -> None:
    check(reference, select(reference, REDUCED), num_output=16)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_prompts_in_one_batch_continue_as_transformers_does(reference: Reference) -> None:
    check(reference, parity_prompts(reference.tokenizer), num_output=48)


def test_nine_heads_on_two_ranks_continue_as_transformers_does(reference: Reference, tmp_path: Path) -> None:
    prompts = select(reference, REDUCED[:5])
    maker = PlanMaker(num_blocks=128, block_size=16)
    sequences = [maker.start(row, prompt.token_ids, GREEDY) for row, prompt in enumerate(prompts)]
    plans = plans_to_length(maker, sequences, num_output=8, chunk=64)

    ranks = run_ranks(smollm2_spec(tp_size=2, num_threads=1), tmp_path / "meet", execute_all, plans, 128)

    assert [report.layout.num_heads for report in ranks] == [2, 1]
    outputs = outputs_by_row(plans, ranks[0].results)
    for row, prompt in enumerate(prompts):
        assert outputs[row] == reference.greedy(prompt.token_ids, num_tokens=8), prompt.name
