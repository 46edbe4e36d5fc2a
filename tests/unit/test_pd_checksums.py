"""Checksums of ferried batches: what is right passes, one wrong bit fails the transfer and says where."""

import pytest
from support.corrupting import CorruptingTransport
from support.local_engine import EngineOptions
from support.local_pair import LocalPair
from support.pd_pools import Instance, command, count_wrong, fill, make_layout
from support.tiny_families import byte_models, byte_prompt, reference_tokens

from blockferry.connectors.base import TransferMode, TransferState
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport

CHECKED = PdWorkerOptions(
    limits=TransferLimits(batch_bytes=4096, num_batches_in_flight=1, are_checked=True), connect_timeout_s=2.0
)


@pytest.fixture
def open_pair():
    """Makes two connected instances whose transports are of one kind, with 40 tokens in blocks 3, 1, 7."""
    made = []

    def make(transport):
        fabric = LoopbackFabric()
        for name in ("p0", "d0"):
            made.append(Instance(name, [make_layout()], lambda: transport(fabric), options=CHECKED))
        prefill, decode = made
        prefill.connect(decode)
        decode.connect(prefill)
        fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
        return prefill, decode

    yield make
    for instance in made:
        instance.close()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_right_bytes_pass(open_pair, mode):
    pair = open_pair(LoopbackTransport)
    instance = pair[0] if mode is TransferMode.PUSH else pair[1]
    instance.start(command([3, 1, 7], [5, 9, 2], 40, mode=mode))
    assert instance.wait()[0].state is TransferState.DONE
    assert count_wrong(pair[1].pools[0], pair[1].layouts[0], [5, 9, 2], 40) == 0
    assert instance.workers[0].num_corrupted == 0


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_byte_that_turns_over_in_the_destination_fails_the_transfer(open_pair, mode):
    pair = open_pair(CorruptingTransport)
    instance = pair[0] if mode is TransferMode.PUSH else pair[1]
    instance.start(command([3, 1, 7], [5, 9, 2], 40, mode=mode))
    (event,) = instance.wait()
    assert event.state is TransferState.FAILED
    assert "corrupted: batch 1 of" in event.reason
    assert event.is_quiesced
    assert instance.workers[0].num_corrupted == 1


def test_the_next_transfer_over_the_same_connection_is_not_harmed(open_pair):
    prefill, _ = open_pair(CorruptingTransport)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    prefill.wait()
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, transfer_id=2))
    assert prefill.wait()[0].state is TransferState.DONE


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_corrupted_prompt_is_recomputed_and_its_answer_is_right(mode):
    path = next(iter(byte_models().values()))
    prompt = byte_prompt(200)
    pair = LocalPair(
        path,
        EngineOptions(max_model_len=512, max_num_batched_tokens=96),
        mode=mode,
        transport=CorruptingTransport,
        connector=CHECKED,
    )
    try:
        assert pair.generate([prompt], 24) == [reference_tokens(path, prompt, 24)]
    finally:
        pair.close()
    assert any("corrupted" in reason for reason in pair.failures)
