"""Whatever bytes come, a decoder returns what it is for or raises ValueError, and mutated messages kill no loop."""

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loops import running_loops

from blockferry.cluster import messages
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.messages import HandleLogprobs, OutputBatch, Rejection, RejectionKind, StatusReply, Tag
from blockferry.cluster.sockets import connect_dealer
from blockferry.connectors.base import (
    PoolEndpoint,
    PoolLayout,
    Strides,
    TransferCommand,
    TransferEvent,
    TransferMode,
    TransferPart,
    TransferState,
)
from blockferry.connectors.handshake import decode_endpoint, encode_endpoint
from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart
from blockferry.engine import wire
from blockferry.engine.config import Role
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams, TokenLogprobs
from blockferry.engine.scheduler.outputs import Finished

I32 = np.array([1, 2], np.int32)
LOGPROBS = wire.RowLogprobs(
    row=1,
    first_position=2,
    is_prompt=False,
    entries=(TokenLogprobs(token_ids=I32, logprobs=np.array([-1.0, -2.0], np.float32), rank=1),),
)
STATS = RequestStats(
    **{
        field.name: 0.5 if field.type == "float" else 1
        for field in dataclasses.fields(RequestStats)
        if field.default is dataclasses.MISSING
    }
)
SAMPLING = SamplingParams(max_tokens=5, stop_token_ids=(7, 8), logit_bias={3: -1.5}, seed=9)
VALID = {
    messages.request_from: Request(
        request_id="r", handle=1, prompt_token_ids=I32, sampling=SAMPLING, arrival_s=1.5, encoder_token_ids=I32
    ),
    messages.command_from: TransferCommand(
        transfer_id=4,
        mode=TransferMode.PULL,
        src_instance_id="p",
        dst_instance_id="d",
        parts=(TransferPart(src_group=1, dst_group=2, src_block_ids=I32, dst_block_ids=I32, num_tokens=20),),
        deadline_s=2.5,
    ),
    messages.event_from: TransferEvent(
        transfer_id=4,
        instance_id="p",
        rank=0,
        state=TransferState.DONE,
        num_bytes=1,
        num_runs=1,
        duration_s=0.1,
    ),
    messages.copy_from: CopyCommand(
        job_id=1, kind=CopyKind.STORE, after_step=2, parts=(CopyPart(group=0, block_ids=I32, units=I32[:, None]),)
    ),
    messages.copied_from: CopyEvent(
        job_id=1, instance_id="p", rank=0, is_done=True, num_bytes=8, duration_s=0.1, reason="none"
    ),
    messages.outputs_from: OutputBatch(
        handles=[1],
        token_ids=[2],
        logprobs=[HandleLogprobs(handle=1, logprobs=LOGPROBS)],
        finished=[Finished(handle=1, reason=FinishReason.STOP, stop_token_id=2, stats=STATS)],
    ),
    messages.rejection_from: Rejection(handle=1, request_id="r", kind=RejectionKind.QUEUE_FULL, reason="full"),
    messages.status_from: StatusReply(query=1, status={"is_serving": True}),
    wire.plan_from_bytes: wire.StepPlan(
        step_id=3,
        freed_rows=I32,
        new_rows=(wire.NewRow(row=1, token_ids=I32, num_prompt_tokens=2, sampling=SAMPLING),),
        zero=np.array([[0, 1]], np.int32),
        copies=np.array([[0, 1, 2]], np.int32),
        rows=I32,
        num_computed=I32,
        num_scheduled=I32,
        sample=np.array([True, False]),
    ),
    wire.result_from_bytes: wire.StepResult(step_id=3, token_ids=I32, logprobs=(LOGPROBS,), duration_s=1.0, error="e"),
}
ENDPOINT = PoolEndpoint(
    instance_id="p",
    tp_rank=0,
    pp_rank=0,
    model_fingerprint="m",
    layouts=(
        PoolLayout(
            order="BHLNC",
            num_blocks=4,
            block_size=16,
            layer_ids=(0, 1),
            head_start=0,
            num_heads=1,
            content_bytes=8,
            dtype="float32",
            strides=Strides(1024, 512, 256, 8),
        ),
    ),
    transport="ucx",
    host_id="h",
    address=b"address",
    region=b"region",
)

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-5, 5) | st.sampled_from(["@", "s", "d"]), inner)
        | st.fixed_dictionaries({"@": st.sampled_from(["i4", "f4", "b1", "x"]), "s": inner, "d": inner})
    ),
    max_leaves=10,
)


def refuses_or_decodes(decode: Any, data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


def paths(value: Any) -> list[list[Any]]:
    """Where something can be exchanged in nested maps and lists."""
    found: list[list[Any]] = [[]]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found += [[key, *rest] for rest in paths(one)]
    return found


def exchanged(value: Any, path: list[Any], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = exchanged(value[path[0]], path[1:], new)
    return copy


@st.composite
def mutations(draw: st.DrawFn, packed: bytes) -> bytes:
    """A valid message with one part exchanged, some bytes exchanged, or cut short."""
    kind = draw(st.sampled_from(["part", "bytes", "cut"]))
    if kind == "part":
        value = msgpack.unpackb(packed, strict_map_key=False)
        mutated: bytes = msgpack.packb(exchanged(value, draw(st.sampled_from(paths(value))), draw(plain)))
        return mutated
    if kind == "cut":
        return packed[: draw(st.integers(0, len(packed) - 1))]
    data = bytearray(packed)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


DECODERS = pytest.mark.parametrize("decode", [*VALID, decode_endpoint], ids=lambda decode: decode.__name__)


def packed(decode: Any) -> bytes:
    return encode_endpoint(ENDPOINT) if decode is decode_endpoint else wire.pack(VALID[decode])


@DECODERS
def test_what_was_packed_is_read_again(decode):
    again = decode(packed(decode))
    assert wire.pack(again) == wire.pack(ENDPOINT if decode is decode_endpoint else VALID[decode])


@DECODERS
@BOUNDED
@given(data=st.data())
def test_mutated_message_is_refused_or_has_the_types_of_a_real_one(decode, data):
    mutated = data.draw(mutations(packed(decode)))
    try:
        again = decode(mutated)
    except ValueError:
        return
    assert same_types(again, decode(packed(decode)))


def same_types(value: Any, real: Any) -> bool:
    """As far as both have the same optional parts."""
    if value is None or real is None or isinstance(real, dict):
        return True
    if isinstance(real, list | tuple) and not hasattr(real, "_fields"):
        return type(value) is type(real) and all(same_types(one, real[0]) for one in value if real)
    if dataclasses.is_dataclass(real):
        names = [field.name for field in dataclasses.fields(real)]
        return type(value) is type(real) and all(same_types(getattr(value, n), getattr(real, n)) for n in names)
    if isinstance(real, np.ndarray):
        return (value.dtype, value.ndim) == (real.dtype, real.ndim)
    return type(value) is type(real)


@DECODERS
@BOUNDED
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(decode, data):
    with pytest.raises(ValueError):
        decode(data)


@DECODERS
@BOUNDED
@given(value=plain)
def test_anything_packed_is_refused_or_decoded(decode, value):
    refuses_or_decodes(decode, msgpack.packb([wire.WIRE_VERSION, value]))


@BOUNDED
@given(frames=st.lists(st.binary(max_size=3), max_size=4))
def test_frames_are_refused_or_split(frames):
    refuses_or_decodes(messages.split, frames)


@BOUNDED
@given(identity=st.binary(max_size=30))
def test_identity_is_refused_or_a_workers(identity):
    refuses_or_decodes(messages.WorkerId.from_bytes, identity)


def test_array_whose_data_is_a_number_takes_no_memory():
    data = msgpack.packb([wire.WIRE_VERSION, {"@": "i4", "s": [1], "d": 1 << 50}])
    with pytest.raises(ValueError, match="not bytes"):
        wire.unpack(data)


ODD = [
    None,
    True,
    -1,
    0,
    1 << 62,
    -(1 << 63),
    (1 << 64) - 1,
    1e308,
    float("nan"),
    "",
    "x",
    b"\xff",
    [],
    [[]],
    {},
    {"@": 1},
]


def odd_versions(decode: Any) -> list[bytes]:
    """A message with each of its parts exchanged for each odd value, and with nothing but that."""
    value = msgpack.unpackb(packed(decode), strict_map_key=False)
    return [msgpack.packb(exchanged(value, path, odd)) for path in paths(value)[1:] for odd in ODD]


async def test_odd_requests_of_a_client_do_not_disturb_another():
    with running_loops({"mixed-0": Role.MIXED}) as rig:
        context = zmq.asyncio.Context()
        odd = context.socket(zmq.DEALER)
        connect_dealer(odd, rig.endpoint, identity=b"odd", linger_ms=0)
        for tag in Tag:
            for payload in [b"", b"\x80"]:
                await odd.send_multipart([tag.value, payload])
        for payload in odd_versions(messages.request_from):
            await odd.send_multipart([Tag.REQUEST.value, payload])
        client = ZmqEngineClient(rig.endpoint)
        await client.connect()
        sampling = SamplingParams(max_tokens=5)
        request = dataclasses.replace(VALID[messages.request_from], encoder_token_ids=None, sampling=sampling)
        outputs = [output async for output in client.submit(request)]
        client.close()
        context.destroy(linger=0)
    assert [token_id for output in outputs for token_id in output.token_ids] == [7] * 5


@pytest.mark.parametrize("tag", [Tag.RESULT, Tag.EVENT, Tag.COPIED, Tag.TROUBLE])
async def test_instance_whose_rank_cannot_be_understood_is_given_up(tag):
    with running_loops({"mixed-0": Role.MIXED}) as rig:
        rig.ranks["mixed-0"].loop._events.put([tag.value, b"\x80"])
        client = ZmqEngineClient(rig.endpoint)
        await client.connect()
        await until(lambda: says(client, f"rank 0 sent a {tag.name} that cannot be read"))
        client.close()


async def test_worker_that_cannot_understand_the_scheduler_says_so():
    with running_loops({"mixed-0": Role.MIXED}) as rig:
        client = ZmqEngineClient(rig.endpoint)
        await client.connect()
        identity = messages.WorkerId(instance_id="mixed-0", rank=0, channel=messages.Channel.STEPS).to_bytes()
        rig.scheduler._calls.tell(lambda: rig.scheduler._workers.send_multipart([identity, b"p", b"\x80"]))
        await until(lambda: says(client, "a message of the scheduler cannot be read"))
        client.close()


async def says(client: ZmqEngineClient, text: str) -> bool:
    return text in (await client.status())["reason"]


async def until(condition: Any) -> None:
    deadline_s = time.monotonic() + 10
    while not await condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        await asyncio.sleep(0.01)
