"""Talk to the application in process: JSON in, JSON or parsed events out."""

import json

import httpx
from support.tiny_engine import TinyEngine, served_model

from blockferry.cluster.api.app import create_app
from blockferry.cluster.api.gate import EVERYBODY, GateRules


class ApiClient:
    """One application over one tiny engine."""

    def __init__(self, engine: TinyEngine | None = None, rules: GateRules = EVERYBODY, **model_changes) -> None:
        self.engine = engine or TinyEngine()
        self.app = create_app(self.engine, served_model(**model_changes), rules)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def get(self, path, *, headers=None):
        return await self._http.get(path, headers=headers)

    async def post(self, path, body=None, *, content=None, headers=None):
        data = json.dumps(body).encode() if content is None else content
        return await self._http.post(path, content=data, headers=headers)

    async def complete(self, **body):
        """POST /v1/completions that must succeed."""
        return _ok(await self.post("/v1/completions", body))

    async def chat(self, content="hi", **body):
        """POST /v1/chat/completions that must succeed."""
        messages = [{"role": "user", "content": content}]
        return _ok(await self.post("/v1/chat/completions", {"messages": messages, **body}))

    async def stream(self, path="/v1/completions", **body):
        """Events of a stream, which must end with [DONE]."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    async def error(self, path="/v1/completions", **body):
        """The (status, error object) of a request that must be refused."""
        return refusal(await self.post(path, body))


def parse_events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


def refusal(response):
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status_code, body["error"]


def _ok(response):
    assert response.status_code == 200, response.text
    return response.json()
