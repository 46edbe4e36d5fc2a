"""Envelopes survive the trip; strangers are refused."""

import dataclasses

import numpy as np
import pytest

from blockferry.cluster import messages
from blockferry.cluster.messages import (
    Channel,
    HandleLogprobs,
    OutputBatch,
    Rejection,
    RejectionKind,
    Tag,
    WorkerId,
)
from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode, TransferPart, TransferState
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams, TokenLogprobs
from blockferry.engine.scheduler.outputs import Finished
from blockferry.engine.wire import RowLogprobs

STATS = RequestStats(
    num_prompt_tokens=3,
    num_output_tokens=2,
    num_cached_tokens=0,
    num_preemptions=0,
    queued_s=0.1,
    prefill_s=0.2,
    transfer_s=0.3,
    transfer_bytes=4,
    transfer_blocks=5,
    transfer_saved_bytes=7,
)


def payload_of(tag, value):
    found, payload = messages.split(messages.encode(tag, value))
    assert found is tag
    return payload


def test_request_survives():
    request = Request(
        request_id="r",
        handle=2**40,
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(max_tokens=5, stop_token_ids=(7, 8), logit_bias={3: -1.5}, seed=9),
        arrival_s=1.5,
    )
    again = messages.request_from(payload_of(Tag.REQUEST, request))
    assert again.prompt_token_ids.tolist() == [1, 2, 3]
    assert again.prompt_token_ids.dtype == np.int32
    assert again.sampling == request.sampling
    assert (again.handle, again.request_id, again.arrival_s) == (2**40, "r", 1.5)


def resumed(**fields):
    request = Request(
        request_id="r",
        handle=1,
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        output_token_ids=np.array([4, 5], np.int32),
        sampling=SamplingParams(),
        arrival_s=0.0,
    )
    return dataclasses.replace(request, **fields)


def test_tokens_that_a_request_had_before_survive():
    again = messages.request_from(payload_of(Tag.REQUEST, resumed()))
    assert again.output_token_ids.tolist() == [4, 5]
    assert again.given_token_ids.tolist() == [1, 2, 3, 4, 5]
    assert again.given_token_ids.dtype == np.int32


def test_request_without_output_has_its_prompt_alone():
    again = messages.request_from(payload_of(Tag.REQUEST, resumed(output_token_ids=np.empty(0, np.int32))))
    assert (again.num_given_tokens, again.given_token_ids.tolist()) == (3, [1, 2, 3])


@pytest.mark.parametrize("token_ids", [np.array([[4, 5]], np.int32), np.array([4, -5], np.int32)])
def test_output_that_is_no_list_of_token_ids_is_refused(token_ids):
    with pytest.raises(ValueError, match="output_token_ids"):
        messages.request_from(payload_of(Tag.REQUEST, resumed(output_token_ids=token_ids)))


def test_end_that_can_be_resumed_survives():
    end = Finished(handle=6, reason=FinishReason.ERROR, stop_token_id=None, stats=STATS, message="", is_resumable=True)
    again = messages.outputs_from(payload_of(Tag.OUTPUT, OutputBatch(finished=[end])))
    assert again.finished == [end]


def test_transfer_command_and_event_survive():
    command = TransferCommand(
        transfer_id=4,
        mode=TransferMode.PULL,
        src_instance_id="p",
        dst_instance_id="d",
        parts=(
            TransferPart(
                src_group=1,
                dst_group=2,
                src_block_ids=np.array([3, 4], np.int32),
                dst_block_ids=np.array([9, 8], np.int32),
                num_tokens=20,
                dst_first_token=2,
            ),
        ),
        deadline_s=2.5,
    )
    again = messages.command_from(payload_of(Tag.TRANSFER, command))
    assert again.mode is TransferMode.PULL
    (part,) = again.parts
    assert (part.src_group, part.dst_group) == (1, 2)
    assert (part.src_block_ids.tolist(), part.dst_block_ids.tolist()) == ([3, 4], [9, 8])
    assert (part.num_tokens, part.first_token, part.dst_first_token) == (20, 0, 2)
    event = TransferEvent(
        transfer_id=4, instance_id="d", rank=1, state=TransferState.DONE, num_bytes=10, num_runs=2, duration_s=0.5
    )
    assert messages.event_from(payload_of(Tag.EVENT, event)) == event


def test_output_batch_survives():
    logprobs = RowLogprobs(
        row=1,
        first_position=3,
        is_prompt=False,
        entries=(TokenLogprobs(token_ids=np.array([5], np.int32), logprobs=np.array([-0.5], np.float32), rank=1),),
    )
    end = Finished(handle=6, reason=FinishReason.STOP, stop_token_id=2, stats=STATS, message="")
    batch = OutputBatch(
        handles=[5, 6], token_ids=[50, 60], logprobs=[HandleLogprobs(handle=5, logprobs=logprobs)], finished=[end]
    )
    again = messages.outputs_from(payload_of(Tag.OUTPUT, batch))
    assert (again.handles, again.token_ids, again.finished) == ([5, 6], [50, 60], [end])
    assert again.logprobs[0].logprobs.entries[0].token_ids.tolist() == [5]


def test_rejection_survives():
    rejection = Rejection(handle=1, request_id="x", kind=RejectionKind.QUEUE_FULL, reason="full")
    assert messages.rejection_from(payload_of(Tag.REJECTED, rejection)) == rejection


def test_worker_identity_survives_slashes():
    worker = WorkerId(instance_id="decode/0", rank=3, channel=Channel.CONTROL)
    assert WorkerId.from_bytes(worker.to_bytes()) == worker


@pytest.mark.parametrize("identity", [b"", b"decode-0", b"decode-0/x/steps", b"decode-0/0/other", b"\xff/0/steps"])
def test_foreign_identity_is_refused(identity):
    with pytest.raises(ValueError):
        WorkerId.from_bytes(identity)


@pytest.mark.parametrize("frames", [[], [b"p"], [b"?", b""], [b"p", b"", b""]])
def test_foreign_frames_are_refused(frames):
    with pytest.raises(ValueError):
        messages.split(frames)


def test_foreign_wire_version_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("blockferry.engine.wire.WIRE_VERSION", 99)
        payload = payload_of(Tag.REJECTED, dataclasses.asdict(Rejection(handle=1, request_id="", kind="x", reason="")))
    with pytest.raises(ValueError, match="wire version 99"):
        messages.rejection_from(payload)
