"""`bench speculation`: against servers in this process, and which deployments it makes."""

import json
from statistics import median

import pytest
from support.api_server import ApiServer
from support.deployments import LLAMA, PD
from support.tiny_engine import TinyEngine, text_reply

from blockferry.cluster.bench.speculation import (
    DRAFTING,
    PLAIN,
    SpeculationBenchConfig,
    run_speculation_bench,
    speculation_deployments,
)
from blockferry.cluster.deployment import load_deployment
from blockferry.engine.errors import ConfigError

SMALL = SpeculationBenchConfig(prompts=("one", "two"), output_len=30, num_runs=2)
TEXT = "the answer to all of it, and no more"
DELAY_S = 0.01  # long enough that tokens of an answer arrive apart, on a busy machine too


def rows_of(report):
    return {(row["name"], row["params"].get("deployment")): row for row in report.to_json()["results"]}


async def run(drafting_text=TEXT):
    with (
        ApiServer(TinyEngine(text_reply(TEXT), delay_s=DELAY_S)) as plain,
        ApiServer(TinyEngine(text_reply(drafting_text), delay_s=DELAY_S, num_at_once=3)) as drafting,
    ):
        rounds = []
        report = await run_speculation_bench(
            SMALL, {PLAIN: plain.url, DRAFTING: drafting.url}, lambda *at: rounds.append(at)
        )
        return rows_of(report), rounds, plain.engine.submitted


async def test_both_are_timed_and_the_drafts_counted():
    rows, rounds, _ = await run()
    assert rounds == [(1, 4), (2, 4), (3, 4), (4, 4)]
    own, others = rows["decode_rate", DRAFTING]["runs"], rows["decode_rate", PLAIN]["runs"]
    pairs = [mine / other for mine, other in zip(own, others, strict=True)]
    assert rows["speed_up", DRAFTING]["runs"] == pytest.approx(pairs)
    assert rows["speed_up", DRAFTING]["value"] == pytest.approx(median(pairs))
    assert min(pairs) <= rows["overall_speed_up", DRAFTING]["value"] <= max(pairs)  # answers are equally long
    assert rows["unequal_answers", DRAFTING]["value"] == 0
    assert (rows["draft_acceptance", DRAFTING]["value"], rows["tokens_per_step", DRAFTING]["value"]) == (1.0, 3.0)


async def test_answers_end_where_the_model_ends_them():
    _, _, submitted = await run()
    assert all(request.sampling.stop_token_ids for request in submitted)
    assert {request.sampling.temperature for request in submitted} == {0.0}


async def test_answers_that_differ_are_counted():
    rows, _, _ = await run("something else altogether")
    assert rows["unequal_answers", DRAFTING]["value"] == 4


@pytest.fixture
def load(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))

    def load_text(rest=""):
        (tmp_path / "deployment.yaml").write_text(PD + rest)
        return load_deployment(tmp_path / "deployment.yaml")

    return load_text


def test_a_deployment_runs_beside_the_same_without_drafts(load):
    made = speculation_deployments(load("speculation: {method: ngram}\n"))
    plain, drafting = made[PLAIN].config, made[DRAFTING].config
    assert [one.scheduler.speculation for one in plain.instances] == [None, None]
    assert all(one.scheduler.speculation for one in drafting.instances)
    assert (plain.api.port, drafting.api.port) == (0, 0)
    assert plain.name != drafting.name


def test_a_deployment_without_drafts_is_refused(load):
    with pytest.raises(ConfigError, match="has no `speculation`, nothing is drafted; add that section"):
        speculation_deployments(load())
