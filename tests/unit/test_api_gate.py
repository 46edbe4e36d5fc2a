"""The gate of the HTTP server: keys, how many at once, when to try again; slow bodies, slow heads and slow readers."""

import asyncio
import contextlib
import json
import logging
import socket
import time

import numpy as np
import pytest
from support.api_client import ApiClient, refusal
from support.api_server import ApiServer
from support.loops import running_loops
from support.tiny_engine import TinyEngine

from blockferry.cluster import engine_client
from blockferry.cluster.api.bodies import BodyReader
from blockferry.cluster.api.errors import ApiError
from blockferry.cluster.api.gate import MAX_RETRY_AFTER_S, RECOVERY_S, WINDOW_S, ApiKeys, GateRules, Pace
from blockferry.cluster.api.streaming import EventStream
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.http_connections import ConnectionLimits
from blockferry.engine.config import Role
from blockferry.engine.request import Request, SamplingParams

KEYED = GateRules(keys=ApiKeys(["first", "second"]))
BODY = {"prompt": "x", "max_tokens": 3}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [None, bearer(""), bearer("third"), bearer("firs"), {"Authorization": "first"}])
async def test_request_without_a_known_key_is_401(headers):
    client = ApiClient(rules=KEYED)
    response = await client.post("/v1/completions", BODY, headers=headers)
    status, error = refusal(response)
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert response.headers["www-authenticate"] == "Bearer"
    assert not client.engine.submitted


@pytest.mark.parametrize("key", ["first", "second"])
async def test_each_key_opens(key):
    response = await ApiClient(rules=KEYED).post("/v1/completions", BODY, headers=bearer(key))
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/docs", "/nothing", "/v1/models/tiny"])
async def test_everything_but_probes_needs_the_key(path):
    assert (await ApiClient(rules=KEYED).get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
async def test_probes_need_no_key(path):
    assert (await ApiClient(rules=KEYED).get(path)).status_code == 200


async def test_one_request_too_many_is_429_and_the_others_are_answered():
    client = ApiClient(TinyEngine(delay_s=0.01), GateRules(max_concurrent_requests=2))
    responses = await asyncio.gather(*(client.post("/v1/completions", BODY) for _ in range(3)))
    assert sorted(response.status_code for response in responses) == [200, 200, 429]
    (refused,) = (response for response in responses if response.status_code == 429)
    assert refusal(refused)[1]["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert (await client.post("/v1/completions", BODY)).status_code == 200


async def test_lost_instance_says_when_to_try_again():
    client = ApiClient()
    client.engine.fail_after = 0
    response = await client.post("/v1/completions", BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, str(RECOVERY_S))


def test_retry_after_is_what_the_others_take_at_the_recent_pace():
    clock = [100.0]
    pace = Pace(lambda: clock[0])
    assert pace.retry_after_s(429, num_others=0) == 1
    assert pace.retry_after_s(429, num_others=5) == WINDOW_S
    for _ in range(5):
        pace.end()
        clock[0] += 2.0
    assert pace.retry_after_s(429, num_others=20) == 40
    assert pace.retry_after_s(429, num_others=1000) == MAX_RETRY_AFTER_S
    clock[0] = 200.0
    assert pace.retry_after_s(429, num_others=0) == 1


class _Body:
    """A request whose body comes in chunks, and then not at all."""

    def __init__(self, *chunks):
        self._chunks = chunks

    async def stream(self):
        for chunk in self._chunks:
            yield chunk
        await asyncio.sleep(60)


async def test_body_that_does_not_arrive_is_408():
    with pytest.raises(ApiError, match="did not arrive") as caught:
        await BodyReader(limit_s=0.02).read(_Body(b"{"))
    assert caught.value.status == 408


async def test_bodies_are_bounded_together_and_give_their_room_back():
    bodies = BodyReader(limit_s=0.05, max_bodies_bytes=100)
    first = asyncio.create_task(bodies.read(_Body(bytes(80))))
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError, match="together") as caught:
        await bodies.read(_Body(bytes(80)))
    assert caught.value.status == 429
    with pytest.raises(ApiError, match="did not arrive"):
        await first
    with pytest.raises(ApiError, match="did not arrive"):
        await bodies.read(_Body(bytes(80)))


def test_connections_that_ask_nothing_are_closed_and_others_go_on():
    limits = ConnectionLimits(max_connections=100, head_limit_s=1.0)
    with ApiServer(TinyEngine()) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rsplit(":", 1)[1])
        silent, slow = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        connections = server._server.server_state.connections
        wait_until(lambda: len(connections) == 2)
        loop_calls(server, lambda: limits.check(connections, now_s=10.0))
        loop_calls(server, lambda: limits.check(connections, now_s=10.5))
        assert limits.num_closed == 0
        loop_calls(server, lambda: limits.check(connections, now_s=11.5))
        assert limits.num_closed == 2
        for one in (silent, slow):
            one.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert one.recv(10) == b""


def test_of_too_many_connections_those_that_waited_longest_are_closed():
    limits = ConnectionLimits(max_connections=2, head_limit_s=100.0)
    with ApiServer(TinyEngine()) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rsplit(":", 1)[1])
        connections = server._server.server_state.connections
        opened = []
        for number in range(4):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            wait_until(lambda count=number + 1: len(connections) == count)
            if number < 2:
                loop_calls(server, lambda now_s=float(number): limits.check(connections, now_s=now_s))
        loop_calls(server, lambda: limits.check(connections, now_s=5.0))
        assert limits.num_closed == 2
        for one in opened[:2]:
            one.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert one.recv(10) == b""


def wait_until(is_true):
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.005)


def loop_calls(server, call):
    """Run a function on the server's event loop."""

    async def run():
        call()

    asyncio.run_coroutine_threadsafe(run(), next(iter(server._server.server_state.connections)).loop).result(10)


async def test_stream_that_nobody_reads_is_ended_and_its_request_aborted(caplog, monkeypatch):
    monkeypatch.setattr(EventStream, "reader_limit_s", 0.05)
    is_closed = asyncio.Event()

    async def events():
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            is_closed.set()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def receive():
        await asyncio.sleep(60)

    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(EventStream(events())({"type": "http"}, receive, send), 5)
    assert is_closed.is_set()
    assert ["read nothing of its stream" in record.getMessage() for record in caplog.records] == [True]


def test_client_that_reads_nothing_takes_a_bounded_buffer_and_then_loses_its_request(monkeypatch):
    monkeypatch.setattr(EventStream, "reader_limit_s", 0.2)
    engine = TinyEngine(lambda request: [10] * 100_000)
    body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": 5}).encode()
    with ApiServer(engine, max_model_len=200_000) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: bool(engine.running))
        (connection,) = server._server.server_state.connections
        buffered = []
        wait_until(lambda: buffered.append(connection.transport.get_write_buffer_size()) or not engine.running)
    assert engine.aborted
    assert max(buffered) < 256 << 10


async def test_request_whose_outputs_lie_unread_is_aborted(monkeypatch, caplog):
    monkeypatch.setattr(engine_client, "MOST_UNREAD", 20)
    with running_loops({"mixed-0": Role.MIXED}) as rig, caplog.at_level(logging.WARNING):
        client = ZmqEngineClient(rig.endpoint)
        await client.connect()
        stream = client.submit(request(client.next_handle()))
        first = await anext(stream)
        async with asyncio.timeout(10):
            while (await client.status())["num_unfinished"]:
                await asyncio.sleep(0.01)
        outputs = [output async for output in stream]
        client.close()
    assert first.token_ids
    assert "lay unread" in outputs[-1].error
    assert sum("unread" in record.getMessage() for record in caplog.records) == 1


def request(handle):
    return Request(
        request_id="r",
        handle=handle,
        prompt_token_ids=np.arange(20, dtype=np.int32),
        sampling=SamplingParams(max_tokens=200),
        arrival_s=0.0,
    )
