"""`bench draft-steps`: a tiny model in this process, and the oracle that drafts its answers. No speed is asserted."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.checkpoints import make_checkpoint
from support.tiny_tokenizers import save_letters

from blockferry.cluster.bench.draft_steps import DraftStepsConfig, run_draft_steps_bench
from blockferry.cluster.bench.draft_ways import Oracle, one_instance, ways_to_draft
from blockferry.cluster.bench.report import Report, Result
from blockferry.cluster.deployment import Deployment, load_deployment
from blockferry.engine.errors import ConfigError
from blockferry.engine.wire import NO_DRAFT, StepPlan, StepResult

TEXT = """
name: test
model: {path: model, dtype: float32, max_model_len: 96}
cache: {num_blocks: 32}
instances: [{role: mixed, num_threads: 1, tensor_parallel: TP}]
"""


def load(folder: Path, tensor_parallel: int = 1) -> Deployment:
    save_letters(make_checkpoint(folder / "model", "llama", vocab_size=100))
    file = folder / "deployment.yaml"
    file.write_text(TEXT.replace("TP", str(tensor_parallel)))
    return load_deployment(file)


def test_every_way_is_measured_beside_the_one_without_drafts(tmp_path: Path) -> None:
    deployment = one_instance(load(tmp_path), num_threads=1)
    ways = ways_to_draft(deployment, "", [1, 3], is_adaptive=False)
    config = DraftStepsConfig(ways=ways, oracle_shares=(1.0,), prompts=("abcabcab", "xyz"), output_len=13, num_runs=2)
    report = run_draft_steps_bench(deployment, config).to_json()
    found = {(one["name"], one["params"]["method"], one["params"].get("drafts")): one for one in report["results"]}
    assert len(found["rate", "off", None]["runs"]) == 2
    assert {key[1:] for key in found} == {("off", None), ("ngram", 1), ("1", 1), ("ngram", 3), ("1", 3)}
    assert all(one["value"] == 0 for (name, *_), one in found.items() if name == "unequal")
    # 12 tokens after the first: of an oracle that is always right, three steps of four, and six of two
    assert found["tokens", "1", 3]["runs"] == [4.0] * 2
    assert found["tokens", "1", 1]["runs"] == [2.0] * 2
    assert found["tokens", "off", None]["runs"] == [1.0] * 2
    assert found["held_2", "1", 3]["value"] == 1


def test_a_narrow_terminal_cuts_no_digits() -> None:
    columns = tuple(f"column_{number}" for number in range(12))
    results = [Result(name=name, params={"drafts": 1}, unit="ms", runs=[0.1234]) for name in columns]
    shown = io.StringIO()
    Report(command="bench test", results=results, columns=columns).print_table(Console(file=shown, width=30))
    assert shown.getvalue().count("0.1234") == 12


def test_an_oracle_drafts_what_follows_and_is_wrong_as_often_as_it_is_told() -> None:
    answer = list(range(100, 1100))
    prompt = np.arange(10, dtype=np.int32)
    plan = StepPlan(
        step_id=1,
        rows=np.zeros(1, np.int32),
        num_computed=np.array([12], np.int32),
        num_scheduled=np.array([3], np.int32),
        num_drafts=np.array([2], np.int32),
        draft_token_ids=np.array([103, 7], np.int32),
        num_proposals=900,
    )
    result = StepResult(step_id=1, token_ids=np.array([103, 104], np.int32))  # positions 13 and 14
    drafts = Oracle(0.7, prompt, answer)(plan, result).proposals[0]
    known = np.arange(105, 1005)
    assert np.mean(drafts == known) == pytest.approx(0.7, abs=0.05)
    drafts = Oracle(1.0, prompt, answer[:10])(plan, result).proposals[0]
    assert drafts[:5].tolist() == answer[5:10]
    assert (drafts[5:] == NO_DRAFT).all()


def test_an_instance_of_several_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several ranks"):
        one_instance(load(tmp_path, tensor_parallel=2), num_threads=0)
