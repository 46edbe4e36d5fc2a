"""A client that leaves takes its requests with it: the engine is told, the server goes on."""

import asyncio
import json

import pytest
from support.api_client import ApiClient
from support.tiny_engine import TinyEngine

ENDLESS = {"prompt": "x", "max_tokens": 200}


class _Connection:
    """A raw ASGI connection that can be cut at any moment."""

    def __init__(self, app, path, body):
        self.sent = []
        self._app = app
        self._gone = asyncio.Event()
        self._body = [json.dumps(body).encode()]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }

    async def _receive(self):
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)

    def start(self):
        self.task = asyncio.create_task(self._app(self.scope, self._receive, self._send))

    async def cut(self):
        self._gone.set()
        await asyncio.wait_for(self.task, 5)


async def _running(engine, count):
    async with asyncio.timeout(5):
        while len(engine.running) != count:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_disconnect_aborts_every_choice(is_stream, num_choices):
    client = ApiClient(TinyEngine(delay_s=0.005))
    connection = _Connection(client.app, "/v1/completions", {**ENDLESS, "n": num_choices, "stream": is_stream})
    connection.start()
    await _running(client.engine, num_choices)
    await asyncio.sleep(0.02)
    await connection.cut()
    assert sorted(client.engine.aborted) == list(range(1, num_choices + 1))
    await _running(client.engine, 0)
    assert await client.complete(prompt="x")


async def test_a_disconnect_before_the_first_token_aborts():
    client = ApiClient(TinyEngine(delay_s=30))
    connection = _Connection(client.app, "/v1/completions", {**ENDLESS, "stream": True})
    connection.start()
    await _running(client.engine, 1)
    await connection.cut()
    assert client.engine.aborted == [1]
    assert not connection.sent


async def test_chat_is_aborted_too():
    client = ApiClient(TinyEngine(delay_s=0.005))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    connection = _Connection(client.app, "/v1/chat/completions", body)
    connection.start()
    await _running(client.engine, 1)
    await connection.cut()
    assert client.engine.aborted == [1]


async def test_a_failing_choice_aborts_the_others():
    engine = TinyEngine(delay_s=0.005)
    client = ApiClient(engine)
    plain = engine.reply

    def reply(request):
        if request.request_id.endswith("-1"):
            raise OSError("broken pipe")
        return plain(request)

    engine.reply = reply
    status, _ = await client.error(prompt="x", max_tokens=200, n=3)
    assert status == 500
    assert 1 in engine.aborted
    assert 3 in engine.aborted


async def test_a_request_id_cannot_be_used_twice_at_a_time():
    client = ApiClient(TinyEngine(delay_s=0.005))
    first = asyncio.create_task(client.complete(**ENDLESS, request_id="same"))
    await _running(client.engine, 1)
    for is_stream in (False, True):
        status, error = await client.error(prompt="x", request_id="same", stream=is_stream)
        assert (status, error["code"], error["param"]) == (400, "duplicate_request_id", "request_id")
    status, _ = await client.error(**ENDLESS, request_id="same")
    assert status == 400
    assert len(client.engine.running) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_finished_request_frees_its_id():
    client = ApiClient()
    assert (await client.complete(prompt="x", request_id="mine"))["id"] == "cmpl-mine"
    assert (await client.complete(prompt="x", request_id="mine"))["id"] == "cmpl-mine"


async def test_the_header_names_a_request_too():
    client = ApiClient()
    response = await client.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "h1"})
    assert response.json()["id"] == "cmpl-h1"
