"""A worker on Triton kernels continues as transformers does: on the GPU where there is one, else interpreted."""

import pytest
from support.checkpoints import load_reference, make_checkpoint, reference_greedy
from support.paged import DEVICE
from support.worker_driver import generate, start_worker, worker_spec

from blockferry.engine.attention.triton import TritonAttention
from blockferry.engine.config import Device
from blockferry.engine.models.triton_ops import TritonOps
from blockferry.engine.worker import worker as worker_module

pytestmark = [pytest.mark.triton, pytest.mark.slow]

PROMPTS = [[5, 17, 200, 33, 9, 80, 41, 7, 12, 150, 3, 61, 90, 22, 18, 4, 260, 111], [44]]
NUM_OUTPUT = 4


@pytest.mark.parametrize(("family", "layout"), [("llama", "BHLNC"), ("qwen3", "LBNHC")])
def test_worker_on_triton_kernels_continues_as_transformers_does(family, layout, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "attention_backend", lambda device, cache_dtype: TritonAttention())
    monkeypatch.setattr(worker_module, "layer_ops", lambda device: TritonOps())
    path = make_checkpoint(tmp_path, family)
    worker = start_worker(worker_spec(path, layout=layout, device=Device(DEVICE)), num_blocks=16)
    try:
        outputs = generate(worker, PROMPTS, num_output=NUM_OUTPUT, chunk=11)
    finally:
        worker.close()

    reference = load_reference(path)
    assert outputs == [reference_greedy(reference, prompt, NUM_OUTPUT) for prompt in PROMPTS]
