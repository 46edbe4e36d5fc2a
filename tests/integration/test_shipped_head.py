"""The head that is shipped for SmolLM2 drafts on an instance what plain torch drafts of it."""

from pathlib import Path

import pytest
import transformers
from support.cluster import smollm2_dir
from support.local_engine import EngineOptions, LocalEngine, start_worker
from support.tiny_families import one_thread
from support.tiny_mtp import DraftOracle, MtpCheckpoint

from blockferry.cluster.shipped import shipped_heads

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.full]
PROMPT = "A short history of the bicycle. The first bicycles were made of wood and had no pedals."
NUM_DRAFTS = 3


def test_proposals_are_those_of_plain_torch() -> None:
    path: Path = smollm2_dir()
    head = MtpCheckpoint(family="llama", path=path, head_path=shipped_heads()["smollm2-135m-mtp"], num_modules=1)
    options = EngineOptions(max_model_len=64, memory_bytes=1 << 26, speculation=head.speculation(NUM_DRAFTS))
    prompt = transformers.AutoTokenizer.from_pretrained(path)(PROMPT).input_ids
    with one_thread():
        worker = start_worker(path, options)
        engine = LocalEngine(path, options, worker)
        try:
            (output,) = engine.generate([prompt], 24)
        finally:
            worker.close()
        oracle, known = DraftOracle(head), len(prompt)
        for plan, result in engine.steps:
            known += len(result.token_ids)
            if plan.sample.any() and result.proposals.shape[1] == NUM_DRAFTS:
                assert result.proposals[0].tolist() == oracle.drafts([*prompt, *output][:known], NUM_DRAFTS)
    assert known == len(prompt) + 24
