"""`bench serve --trace` on a deployment of its own: two prefill and two decode instances, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_families import FAMILIES, build
from support.tiny_tokenizers import save_letters

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(400)]

BIN = Path(sys.executable).parent
BLOCK_TOKENS = 8


def conversations(num_conversations: int, num_turns: int) -> Iterator[dict[str, Any]]:
    """Lines of a trace: four blocks at first, and two more with every turn."""
    for turn in range(num_turns):
        for number in range(num_conversations):
            hash_ids = [100 * number + block for block in range(2 * turn + 4)]
            yield {
                "timestamp": 250 * (turn * num_conversations + number),
                "input_length": 512 * len(hash_ids),
                "output_length": 1024,
                "hash_ids": hash_ids,
            }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("replay")
    path = build(FAMILIES["llama"], folder)
    save_letters(path)
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, conversations(8, 4))))
    (folder / "2p2d.yaml").write_text(
        f"model: {{path: {path}, dtype: float32, max_model_len: 128}}\n"
        f"cache: {{block_size: {BLOCK_TOKENS}, num_blocks: 400}}\n"
        "speculation: {method: ngram, min_ngram: 1}\n"
        "scheduler: {max_num_seqs: 8, max_num_batched_tokens: 64}\n"
        "instances:\n"
        "  - {role: prefill, replicas: 2, resources: {num_cpus: 0.25}}\n"
        "  - {role: decode, replicas: 2, resources: {num_cpus: 0.25}}\n"
        "api: {port: 0}\n"
    )
    options = ["--trace-scale-len", str(BLOCK_TOKENS), "--router", "prefix_affinity", "--json", str(folder / "out")]
    command = [str(BIN / "blockferry"), "bench", "serve", "--config", str(folder / "2p2d.yaml")]
    done = subprocess.run(
        [*command, "--trace", str(folder / "trace.jsonl"), *options],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((folder / "out").read_text())["results"]
    return found


def values(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row["value"] for row in rows if row["name"] == name]


def test_every_request_is_answered(rows: list[dict[str, Any]]) -> None:
    assert values(rows, "failed_requests") == values(rows, "skipped_requests") == [0]
    assert values(rows, "request_throughput")[0] > 0


def test_nine_tenths_of_what_the_trace_repeats_is_found(rows: list[dict[str, Any]]) -> None:
    (ideal,), (found,) = values(rows, "ideal_hit_rate"), values(rows, "prefix_hit_rate")
    assert found >= 0.9 * ideal > 0.3


def test_every_instance_takes_part(rows: list[dict[str, Any]]) -> None:
    assert len(values(rows, "queried_tokens")) == 4
    assert min(values(rows, "queried_tokens")) > 0


def test_drafts_are_reported(rows: list[dict[str, Any]]) -> None:
    (acceptance,), (num_tokens,) = values(rows, "draft_acceptance"), values(rows, "tokens_per_step")
    assert 0 < acceptance < 1 < num_tokens


def test_all_blocks_are_free_and_the_ledgers_proved_in_the_end(rows: list[dict[str, Any]]) -> None:
    assert values(rows, "used_blocks_at_end") == [0, 0, 0, 0]
    assert values(rows, "integrity_checks")[0] >= 1
