"""The serving benchmark against a real server on loopback whose speed is known."""

import io
import json
from statistics import median

import pytest
from rich.console import Console
from support.api_server import ApiServer
from support.tiny_engine import TinyEngine

from blockferry.cluster.bench.load import Answer
from blockferry.cluster.bench.replay import ReplayConfig, replay
from blockferry.cluster.bench.report import Result, emit
from blockferry.cluster.bench.serve import Measured, ServeBenchConfig, plot_of, random_prompts, run_serve_bench

DELAY_S = 0.01
SILENT = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def server():
    with ApiServer(TinyEngine(delay_s=DELAY_S)) as server:
        yield server


def _config(server, **changes):
    options = {"base_url": server.url, "num_prompts": 6, "num_warmup": 1, "input_len": 8, "output_len": 5}
    return ServeBenchConfig(**{**options, "concurrency": 3, **changes})


def _value(report, name, statistic=None):
    rows = [r for r in report.results if r.name == name and r.params.get("statistic") == statistic]
    assert len(rows) == 1, (name, statistic, rows)
    return rows[0].value


async def test_latencies_and_rates_are_those_of_the_server(server):
    report = await run_serve_bench([_config(server)], console=SILENT)
    assert _value(report, "failed_requests") == 0
    assert _value(report, "ttft", "median") >= DELAY_S * 1e3
    assert _value(report, "tpot", "mean") == pytest.approx(DELAY_S * 1e3, rel=0.9)
    assert _value(report, "itl", "p99") >= DELAY_S * 1e3 * 0.9
    assert _value(report, "e2e", "median") >= 5 * DELAY_S * 1e3
    assert _value(report, "output_throughput") == pytest.approx(6 * 5 / _value(report, "duration"))


async def test_the_open_loop_follows_its_rate_not_the_answers(server):
    config = _config(server, concurrency=None, rate_per_s=200.0, num_prompts=10)
    report = await run_serve_bench([config], console=SILENT)
    assert _value(report, "duration") < 10 * 5 * DELAY_S
    assert _value(report, "failed_requests") == 0


async def test_requests_that_do_not_end_in_time_are_failures():
    with ApiServer(TinyEngine(delay_s=0.1)) as server:
        config = _config(server, concurrency=1, num_prompts=20, num_warmup=0, output_len=3, max_duration_s=2)
        report = await run_serve_bench([config], console=SILENT)
    assert 10 < _value(report, "failed_requests") < 20
    assert _value(report, "duration") < 4


async def test_ceiling_rows_are_added(server):
    def ceiling(measured: Measured):
        ratio = measured.num_output_tokens / measured.duration_s / 1000
        return [Result(name="ceiling_ratio", params=measured.config.params, unit="1", runs=[ratio])]

    report = await run_serve_bench([_config(server)], console=SILENT, ceiling=ceiling)
    assert 0 < _value(report, "ceiling_ratio") < 1


async def test_json_and_plot_are_written(server, tmp_path):
    configs = [_config(server, concurrency=count, num_prompts=2) for count in (1, 2)]
    report = await run_serve_bench(configs, console=SILENT)
    emit(report, json_target=tmp_path / "b.json", plot=plot_of(configs, tmp_path / "b.png"))
    document = json.loads((tmp_path / "b.json").read_text())
    assert set(document) == {"command", "version", "machine", "results"}
    assert document["command"] == "bench serve"
    assert all(set(row) == {"name", "params", "value", "unit", "runs"} for row in document["results"])
    assert all(row["value"] == median(row["runs"]) for row in document["results"])
    assert (tmp_path / "b.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"base_url": "http://127.0.0.1:1"}, "no OpenAI endpoint answers"),
        ({"model": "other"}, "'other' is not served"),
        ({"input_len": 5000}, "warm-up request failed.*context"),
    ],
)
async def test_what_cannot_be_measured_is_one_clear_error(server, changes, part):
    with pytest.raises(ValueError, match=part):
        await run_serve_bench([_config(server, **changes)], console=SILENT)


@pytest.mark.parametrize(
    "changes",
    [{"num_prompts": 0}, {"concurrency": 0}, {"rate_per_s": 0}, {"range_ratio": 1}, {"concurrency": None}],
)
def test_absurd_settings_are_refused(server, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        _config(server, **changes)


def test_prompts_repeat_with_their_seed_and_keep_their_range(server):
    config = _config(server, range_ratio=0.5, num_prompts=50)
    prompts = random_prompts(config, 1000)
    assert prompts == random_prompts(config, 1000)
    lengths = {len(prompt.token_ids) for prompt in prompts}
    assert min(lengths) >= 4
    assert max(lengths) <= 12
    assert len(lengths) > 3
    with pytest.raises(ValueError, match="vocabulary"):
        random_prompts(config, None)


def test_one_token_has_no_time_per_output_token():
    assert Answer(num_prompt_tokens=1, num_output_tokens=1, ttft_s=1.0, e2e_s=1.0).tpot_s is None


async def test_trace_is_replayed_with_every_request(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 10 * number, "input_length": 1100, "output_length": 128, "hash_ids": [0, 1, number]}
        for number in range(2, 8)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    config = ReplayConfig(base_url=server.url, trace=trace, block_tokens=4)
    values = {(row.name, row.params.get("statistic")): row.value for row in await replay(config, console=SILENT)}
    assert values["failed_requests", None] == values["skipped_requests", None] == 0
    assert values["duration", None] >= 0.05
    assert values["ideal_hit_rate", None] == pytest.approx(5 * 8 / (6 * 9))
    assert values["ttft", "median"] >= DELAY_S * 1e3


async def test_trace_at_no_server_is_one_clear_error(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}')
    with pytest.raises(ValueError, match="no OpenAI endpoint answers at"):
        await replay(ReplayConfig(base_url="http://127.0.0.1:9", trace=trace), console=SILENT)
