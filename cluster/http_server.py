"""The HTTP server as a process runs it: socket, application, connection to the scheduler, uvicorn.

Owns their order of opening and closing. Runs in any process, with or without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import uvicorn

from blockferry.cluster.api.app import create_app
from blockferry.cluster.api.gate import ApiKeys, GateRules
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.http_connections import ConnectionLimits
from blockferry.cluster.listen import bind
from blockferry.cluster.sockets import Endpoint
from blockferry.engine.config import ApiConfig, HealthConfig, ModelConfig

GRACEFUL_STOP_S = 2


class HttpServer:
    """One HTTP server. open() comes long before run(), so that a busy port is reported before models load."""

    def __init__(self, model: ModelConfig, api: ApiConfig, health: HealthConfig) -> None:
        self._model = model
        self._api = api
        self._health = health
        self._client: ZmqEngineClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._is_ready = threading.Event()

    def open(self) -> str:
        """Bind the port; returns the base URL. Raises ListenError."""
        self._socket = bind(self._api.host, self._api.port)
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, endpoint: Endpoint) -> None:
        """Serve what the scheduler at `endpoint` computes, on this thread, until stop()."""
        asyncio.run(self._serve(endpoint))

    async def _serve(self, endpoint: Endpoint) -> None:
        assert self._socket is not None, "open() comes first"
        served = ServedModel.load(self._model, chat_template=self._api.chat_template)
        client = ZmqEngineClient(endpoint, resume_timeout_s=self._health.resume_timeout_s)
        await client.connect()
        self._client, self._loop = client, asyncio.get_running_loop()
        try:
            config = uvicorn.Config(
                create_app(client, served, self._rules()),
                http="h11",  # which limits a request's head to 64 KiB; httptools does not
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACEFUL_STOP_S,
            )
            self._server = uvicorn.Server(config)
            limits = ConnectionLimits(max_connections=self._api.max_connections)
            watch = asyncio.create_task(limits.watch(self._server.server_state.connections))
            self._is_ready.set()
            # not serve(): that would take over the signals, which belong to the process's owner
            await self._server._serve([self._socket])
            watch.cancel()
        finally:
            client.close()

    def _rules(self) -> GateRules:
        keys = ApiKeys(self._api.keys)
        return GateRules(keys=keys, max_concurrent_requests=self._api.max_concurrent_requests)

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the server answers within timeout_s. Any thread."""
        return self._is_ready.wait(timeout_s)

    def reconnect(self, endpoint: Endpoint) -> None:
        """Go on with another scheduler, open requests included. Any thread but the server's.

        Raises InstanceFailed when nobody answers there.
        """
        assert self._client is not None, "run() comes first"
        assert self._loop is not None, "run() comes first"
        asyncio.run_coroutine_threadsafe(self._client.reconnect(endpoint), self._loop).result()

    def stop(self) -> None:
        """End run() soon. Any thread."""
        if self._server is not None:
            self._server.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        """Requests that wait for another scheduler end with an error, rather than with their connections."""
        if self._client is not None and self._client.lost_reason:
            self._client.close()
