"""Fates of streams, told apart by what a real HTTP server sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from blockferry.cluster.bench.load import Endpoint
from blockferry.cluster.bench.survival_load import Client, Fate, Stream, count_fates

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def sending(*events: bytes, is_cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


async def refuse(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no instance is left"}}, status=503)


async def never_answer(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError("nobody waits so long")


def run(handler: Handler, *, expected: str, limit_s: float = 10.0) -> Stream:
    """One stream from a server that answers with `handler`."""

    async def serve_and_ask() -> Stream:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        stream = Stream(prompt=[1, 2], expected=expected)
        try:
            async with aiohttp.ClientSession() as session:
                endpoint = Endpoint(url=f"http://{host}:{port}/v1", model="m")
                await Client(session=session, endpoint=endpoint, max_tokens=4, limit_s=limit_s).run(stream)
        finally:
            await runner.cleanup()
        return stream

    return asyncio.run(serve_and_ask())


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "instance prefill-0 failed"}}\n\n'


def test_the_whole_text_is_exact() -> None:
    assert run(sending(chunk("a"), chunk("b"), DONE), expected="ab").fate is Fate.EXACT


def test_an_error_behind_a_true_beginning_is_an_error() -> None:
    stream = run(sending(chunk("a"), ERROR), expected="ab")
    assert (stream.fate, stream.error) == (Fate.ERROR, "instance prefill-0 failed")


def test_a_refusal_is_an_error() -> None:
    assert run(refuse, expected="ab").error == "no instance is left"


def test_an_end_without_a_word_is_a_cut() -> None:
    assert run(sending(chunk("a"), is_cut=True), expected="ab").fate is Fate.CUT


@pytest.mark.parametrize("text", ["abc", "a", "xy"])
def test_any_other_text_that_claims_to_be_whole_is_wrong(text: str) -> None:
    assert run(sending(chunk(text), DONE), expected="ab").fate is Fate.WRONG


def test_an_error_behind_another_text_is_wrong() -> None:
    assert run(sending(chunk("x"), ERROR), expected="ab").fate is Fate.WRONG


def test_what_does_not_end_in_time_has_hung() -> None:
    assert run(never_answer, expected="ab", limit_s=0.1).fate is Fate.HUNG


def test_all_fates_are_counted() -> None:
    streams = [Stream(prompt=[1], expected="ab", text="ab", is_done=True), Stream(prompt=[1], expected="ab")]
    assert count_fates(streams) == {Fate.EXACT: 1, Fate.ERROR: 0, Fate.CUT: 1, Fate.HUNG: 0, Fate.WRONG: 0}
