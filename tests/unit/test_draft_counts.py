"""What was drafted and accepted, from the scheduler's counters to `status`, /metrics and `bench serve`."""

import io

import pytest
from rich.console import Console
from support.api_client import ApiClient
from support.api_server import ApiServer
from support.tiny_engine import TinyEngine

from blockferry.cluster import cli_output, snapshot
from blockferry.cluster.bench.drafts import counts_in, draft_rows
from blockferry.cluster.bench.serve import ServeBenchConfig, run_serve_bench
from blockferry.cluster.draft_counts import DraftCounts, draft_words
from blockferry.cluster.generate import Answer
from blockferry.cluster.health import HealthBoard
from blockferry.engine.request import FinishReason, RequestStats

COUNTS = {"drafted_per_position": [100, 80, 60], "accepted_per_position": [75, 40, 5]}
NAMES = {"draft_acceptance", "tokens_per_step"}
VLLM = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 15.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 4.0
"""


def test_status_says_how_drafts_fare() -> None:
    assert draft_words(COUNTS) == (
        "speculation: 120 of 240 drafted tokens accepted (50.0%; by position 75%, 50%, 8%), "
        "2.20 tokens per step with drafts"
    )
    nothing = {name: [0, 0] for name in COUNTS}
    assert draft_words(nothing) == "speculation: nothing was drafted yet"


def test_status_has_a_line_of_each_instance_that_verifies(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ("num_ranks", "num_running", "num_waiting", "num_free_blocks", "num_blocks", "num_preemptions")
    deployment = {
        **dict.fromkeys(("deployment", "model", "url", "connector", "router"), "x"),
        **{"healthy": True, "uptime_s": 1.0, "num_unfinished": 0, "handoffs": {}, "workers": []},
        "transfers": dict.fromkeys(("num_done", "num_bytes", "num_failed"), 0),
        "prefix_cache": dict.fromkeys(("num_queried_tokens", "num_hit_tokens", "hit_rate"), 0),
        "instances": [
            {**dict.fromkeys(numbers, 1), "instance_id": f"{role}-0", "role": role, "state": "serving", "plan": None}
            | {"speculation": COUNTS}
            for role in ("prefill", "decode")
        ],
    }
    cli_output.print_status([deployment])
    lines = [line for line in capsys.readouterr().out.splitlines() if "speculation" in line]
    assert lines == [f"  decode-0: {draft_words(COUNTS)}"]


def test_generate_says_how_many_drafts_of_an_answer_were_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    stats = RequestStats(
        **dict.fromkeys(("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"), 8),
        **dict.fromkeys(("queued_s", "prefill_s", "transfer_s"), 0.0),
        **dict.fromkeys(("transfer_bytes", "transfer_blocks", "transfer_saved_bytes"), 0),
        num_drafted_tokens=30,
        num_accepted_tokens=12,
    )
    answer = Answer(
        prompt="x",
        prompt_token_ids=[],
        token_ids=[],
        text="y",
        finish_reason=FinishReason.LENGTH,
        error="",
        ttft_s=0.0,
        e2e_s=0.0,
        stats=stats,
    )
    cli_output.print_answers([answer])
    assert "12 of 30" in capsys.readouterr().out
    assert answer.to_json()["metrics"]["num_accepted_tokens"] == 12


@pytest.mark.parametrize("instance", [{"speculation": None}, {}])
def test_an_instance_that_drafts_nothing_shows_no_counters(instance: dict) -> None:
    assert not [key for key in completed(instance) if key.startswith("speculation_")]


def test_counters_of_an_instance_are_summed() -> None:
    shown = completed({"speculation": COUNTS})
    assert [shown[f"speculation_num_{name}"] for name in ("drafts", "drafted", "accepted")] == [100, 240, 120]


def completed(instance: dict) -> dict:
    known = {"instance_id": "m", "state": "serving", "failure": "", "tiers": {}, "is_wanted": True}
    known |= dict.fromkeys(("usage", "num_queried_tokens", "num_hit_tokens"), 0)
    health = HealthBoard(silence_limit_s=1.0)
    health.add("m", num_ranks=1)
    status = {"instances": [known | instance]}
    snapshot.complete(status, health, now_s=0.0)
    return status["instances"][0]


async def test_metrics_have_the_names_of_the_field() -> None:
    client = ApiClient(TinyEngine(num_at_once=3))
    await client.complete(prompt=[5, 6, 7], max_tokens=6)
    page = (await client.get("/metrics")).text
    labels = 'engine="mixed0",model_name="tiny"'
    for name, value in (("drafts", 2), ("draft_tokens", 4), ("accepted_tokens", 4)):
        assert f'blockferry:spec_decode_num_{name}_total{{{labels},role="mixed"}} {value}.0' in page
    for name in ("draft_tokens", "accepted_tokens"):
        for position in (0, 1):
            series = f'{{{labels},position="{position}",role="mixed"}}'
            assert f"blockferry:spec_decode_num_{name}_per_pos_total{series} 2.0" in page


def test_counters_of_all_instances_of_any_server_are_read() -> None:
    assert counts_in(VLLM) == DraftCounts(num_drafts=15, num_drafted=45, num_accepted=24)


def test_a_server_that_drafts_nothing_has_no_counters() -> None:
    assert counts_in("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n") is None


@pytest.mark.parametrize("later", [None, DraftCounts(num_drafts=1, num_drafted=2, num_accepted=2)])
def test_counters_that_are_gone_or_began_anew_say_nothing(later: DraftCounts | None) -> None:
    assert not draft_rows(DraftCounts(num_drafts=5, num_drafted=9, num_accepted=0), later, {})


@pytest.mark.parametrize(("num_at_once", "rows"), [(4, {"draft_acceptance": 1.0, "tokens_per_step": 4.0}), (1, {})])
async def test_bench_tells_what_drafts_brought_during_its_run(num_at_once: int, rows: dict[str, float]) -> None:
    with ApiServer(TinyEngine(num_at_once=num_at_once)) as server:
        config = ServeBenchConfig(
            base_url=server.url, num_prompts=4, num_warmup=1, input_len=8, output_len=8, concurrency=2
        )
        report = await run_serve_bench([config], console=Console(file=io.StringIO()))
    assert {
        row.name: row.value for row in report.results if row.name in {"draft_acceptance", "tokens_per_step"}
    } == rows
