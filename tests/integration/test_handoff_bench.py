"""`bench handoff`: against servers in this process, and whole, from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from support.api_server import ApiServer
from support.tiny_engine import TinyEngine

from blockferry.cluster.bench.handoff import HandoffBenchConfig, Target, run_handoff_bench

BIN = Path(sys.executable).parent
SMALL = HandoffBenchConfig(prompt_tokens=12, num_runs=3, num_warmup=1)


@pytest.fixture(scope="module")
def engines():
    return [TinyEngine(delay_s=0.005), TinyEngine(delay_s=0.005)]


@pytest.fixture(scope="module")
def targets(engines):
    with ApiServer(engines[0]) as mixed, ApiServer(engines[1]) as apart:
        yield [Target(name="mixed", url=mixed.url), Target(name="pd_after_prefill", url=apart.url)]


async def test_every_deployment_is_timed_and_held_against_the_first(targets):
    document = (await run_handoff_bench(SMALL, targets)).to_json()
    assert document["command"] == "bench handoff"
    rows = {(row["name"], row["params"]["deployment"], row["params"].get("of")): row for row in document["results"]}
    assert all(row["params"]["prompt_tokens"] == 12 for row in rows.values())
    times = {(name, target, None) for name in ("ttft", "second_token") for target in ("mixed", "pd_after_prefill")}
    ratios = {(name, "pd_after_prefill", of) for name in ("ratio", "ratio_of_best") for of in ("ttft", "second_token")}
    assert times | ratios <= rows.keys()
    for of in ("ttft", "second_token"):
        own, others = rows[of, "pd_after_prefill", None]["runs"], rows[of, "mixed", None]["runs"]
        pairs = [mine / other for mine, other in zip(own, others, strict=True)]
        assert len(pairs) == 3
        assert rows["ratio", "pd_after_prefill", of]["runs"] == pytest.approx(pairs)
        assert rows["ratio", "pd_after_prefill", of]["value"] == pytest.approx(median(pairs))
    for target in ("mixed", "pd_after_prefill"):
        firsts, seconds = rows["ttft", target, None]["runs"], rows["second_token", target, None]["runs"]
        assert all(second >= first for first, second in zip(firsts, seconds, strict=True))


async def test_what_was_ferried_for_each_request_is_told_of_those_that_ferry(targets):
    results = (await run_handoff_bench(SMALL, targets)).results
    ferried = {
        (row.name, row.params["deployment"]): row for row in results if row.unit == "B" or "transfer" in row.name
    }
    assert ferried["transfer_bytes", "pd_after_prefill"].runs == [4096, 4096, 4096]
    assert ferried["exposed_transfer", "pd_after_prefill"].runs == pytest.approx([2.0] * 3)
    assert not any(deployment == "mixed" for _, deployment in ferried)


async def test_one_round_asks_all_the_same_and_no_two_rounds_do(targets, engines):
    for engine in engines:
        engine.submitted.clear()
    await run_handoff_bench(SMALL, targets)
    first, second = ([request.prompt_token_ids.tolist() for request in engine.submitted] for engine in engines)
    assert first == second
    assert len({tuple(prompt) for prompt in first}) == 4
    assert {len(prompt) for prompt in first} == {12}


async def test_rounds_may_repeat_one_prompt(targets, engines):
    engines[0].submitted.clear()
    await run_handoff_bench(HandoffBenchConfig(prompt_tokens=12, num_runs=3, is_repeated=True), targets)
    assert len({tuple(request.prompt_token_ids.tolist()) for request in engines[0].submitted}) == 1


async def test_no_round_starts_after_the_time_limit_but_the_first(targets):
    config = HandoffBenchConfig(prompt_tokens=12, num_runs=50, num_warmup=0, time_limit_s=-1.0)
    report = await run_handoff_bench(config, targets)
    assert {len(row.runs) for row in report.results} == {1}


async def test_a_failing_deployment_is_one_clear_error(targets):
    with pytest.raises(ValueError, match="a request to mixed failed: ValueError: HTTP 400"):
        await run_handoff_bench(HandoffBenchConfig(prompt_tokens=5000), targets)
    with pytest.raises(ValueError, match="no OpenAI endpoint answers at http"):
        await run_handoff_bench(SMALL, [Target(name="mixed", url="http://127.0.0.1:1")])


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.model
def test_prompts_are_handed_over_between_real_workers(tmp_path):
    config, baseline, out = (tmp_path / name for name in ("pd.yaml", "mixed.yaml", "out.json"))
    head = "model: {name: smollm2-135m-instruct, dtype: bfloat16, max_model_len: 256}\ncache: {num_blocks: 40}\n"
    config.write_text(head + "instances: [{role: prefill}, {role: decode}]\n")
    baseline.write_text(head + "instances: [{role: mixed}]\n")
    command = [str(BIN / "blockferry"), "bench", "handoff", "--config", str(config), "--baseline", str(baseline)]
    options = ["--prompt-tokens", "64", "--runs", "2", "--num-warmup", "0", "--json", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    ferried = [row for row in document["results"] if row["name"] == "transfer_bytes"]
    assert {row["params"]["deployment"] for row in ferried} == {"pd_after_prefill", "pd_overlapped"}
    assert {size for row in ferried for size in row["runs"]} == {4 * 30 * 3 * 16 * 2 * 64 * 2}
    assert "Traceback" not in done.stderr
