"""Traces: reading, scaling, the hits of an endless cache, and prompts whose blocks are equal where ids are."""

import json
from pathlib import Path

import pytest

from blockferry.cluster.bench.load import Answer
from blockferry.cluster.bench.replay import ReplayConfig, deployment_rows, hit_rows
from blockferry.cluster.bench.trace import (
    TraceRequest,
    fitting,
    ideal_hit_tokens,
    prompts_of,
    read_trace,
    scaled,
)


def line(timestamp: float = 0, tokens: int = 1000, output: int = 64, ids: tuple[int, ...] = (0, 1)) -> str:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}
    return json.dumps(row) + "\n"


def written(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def request(*ids: int, num_tokens: int | None = None) -> TraceRequest:
    count = 8 * len(ids) if num_tokens is None else num_tokens
    return TraceRequest(arrival_s=0.0, num_prompt_tokens=count, num_output_tokens=4, hash_ids=ids)


def test_requests_are_read_in_order_of_arrival(tmp_path):
    file = written(tmp_path, line(2000), line(1000, tokens=500, ids=(7,)))
    first, second = read_trace(file, limit=10)
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens, first.hash_ids) == (1.0, 500, 64, (7,))
    assert second.arrival_s == 2.0


def test_only_the_first_requests_are_read(tmp_path):
    assert len(read_trace(written(tmp_path, line(), line(), "not even JSON"), limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("nothing\n", "trace.jsonl:2 is no request"),
        ("[]\n", "trace.jsonl:2 is no request"),
        ('{"timestamp": 0}\n', "has no input_length"),
        (line(ids=(1,)), "1 hash_ids do not cover input_length=1000"),
        (line(tokens=0, ids=()), "input_length at least 1"),
        (line(output=-1), "whole numbers"),
        (line(timestamp=-1), "timestamp=-1 is no time"),
    ],
)
def test_bad_line_is_named(tmp_path, bad, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_trace(written(tmp_path, line(), bad), limit=10)


def test_file_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as a trace"):
        read_trace(tmp_path / "none.jsonl", limit=1)
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(written(tmp_path), limit=1)


def test_scaled_request_has_as_many_shorter_blocks(tmp_path):
    (whole,) = read_trace(written(tmp_path, line(6000, tokens=1000, output=64)), limit=1)
    short = scaled(whole, block_tokens=8, speed=2.0)
    assert (short.arrival_s, short.num_prompt_tokens, short.num_output_tokens) == (3.0, 16, 1)
    assert short.hash_ids == whole.hash_ids


def test_request_that_fits_no_model_is_left_out_and_long_outputs_are_cut():
    kept = fitting([request(1, 2), request(1)], max_model_len=10)
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in kept] == [(8, 2)]


def test_ideal_counts_leading_blocks_seen_before():
    trace = [request(1, 2, 3), request(1, 2, 4), request(9, 2, 3), request(1, 2, 3, 5)]
    assert ideal_hit_tokens(trace, block_tokens=8) == 0 + 16 + 0 + 24


def test_ideal_leaves_a_token_of_each_prompt_to_compute():
    trace = [request(1, 2, num_tokens=12), request(1, 2, num_tokens=12)]
    assert ideal_hit_tokens(trace, block_tokens=8) == 11


def test_equal_ids_are_equal_blocks_of_the_prompts():
    trace = [request(1, 2), request(1, 3, num_tokens=13)]
    first, second = prompts_of(trace, block_tokens=8, token_range=(10, 500), seed=0)
    assert (len(first.token_ids), len(second.token_ids)) == (16, 13)
    assert first.token_ids[:8] == second.token_ids[:8]
    assert first.token_ids[8:13] != second.token_ids[8:]
    assert all(10 <= token_id < 500 for token_id in first.token_ids)


def config(**changes) -> ReplayConfig:
    return ReplayConfig(**{"base_url": "http://localhost", "trace": Path("t.jsonl"), "block_tokens": 8, **changes})


def test_hit_rates_are_held_against_the_ideal():
    trace = [request(1, 2), request(1, 2)]
    answers = [Answer(num_prompt_tokens=16, num_cached_tokens=count) for count in (0, 12)]
    rates = {row.name: row.value for row in hit_rows(trace, answers, config())}
    assert rates == {"ideal_hit_rate": 15 / 32, "prefix_hit_rate": 12 / 32, "hit_ratio_of_ideal": 12 / 15}


def test_server_that_tells_no_cached_tokens_has_an_ideal_only():
    rows = hit_rows([request(1)], [Answer(num_prompt_tokens=8)], config())
    assert [row.name for row in rows] == ["ideal_hit_rate"]


def test_instances_are_shown_with_what_they_missed_and_what_they_still_hold():
    def status(queried, hit, free, audits):
        instance = {"instance_id": "p", "num_queried_tokens": queried, "num_hit_tokens": hit}
        return {"instances": [instance | {"num_blocks": 100, "num_free_blocks": free}], "num_audits": audits}

    rows = deployment_rows(status(10, 4, 100, 1), status(110, 64, 98, 2), config())
    assert {row.name: row.value for row in rows} == {
        "queried_tokens": 100,
        "missed_tokens": 40,
        "used_blocks_at_end": 2,
        "integrity_checks": 1,
    }


@pytest.mark.parametrize("bad", [{"block_tokens": 513}, {"speed": 0.0}, {"limit": 0}])
def test_option_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="outside"):
        config(**bad)
