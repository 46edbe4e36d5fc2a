"""The shipped deployment that drafts with a head, prefill and decode apart: it writes what the model writes alone."""

from pathlib import Path

import pytest
from support.cluster import live_deployment, smollm2_dir
from support.local_engine import EngineOptions, LocalEngine, make_request, start_worker
from support.tiny_families import one_thread

from blockferry.cluster.api.tokenizer import Tokenizer
from blockferry.cluster.shipped import shipped_configs
from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

SHIPPED = "smollm2-pd-mtp-cpu.yaml"


def test_shipped_deployment_with_a_head_answers_as_without(tmp_path: Path) -> None:
    model = smollm2_dir()
    text = shipped_configs()[SHIPPED].read_text()
    for written, here in (("name: smollm2-pd-mtp\n", ""), ("bfloat16", "float32"), ("num_cpus: 1", "num_cpus: 0.5")):
        assert written in text
        text = text.replace(written, here)
    options = EngineOptions(max_model_len=512, max_num_batched_tokens=512, memory_bytes=1 << 27)
    tokenizer = Tokenizer.load(model)
    prompts = [tokenizer.encode(one, add_special_tokens=False) for one in ("Once upon a time, there was", "The sun is")]
    with one_thread():
        engine = LocalEngine(model, options, start_worker(model, options))
        expected = engine.run([make_request(engine.next_handle(), prompt, 40) for prompt in prompts])
    with live_deployment(text, tmp_path) as live:
        done = live.complete(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    assert [one.token_ids for one in done] == expected
    assert sum(one.stats.num_accepted_tokens for one in done if one.stats is not None) > 0
