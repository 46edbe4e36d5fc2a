"""The HTTP server as a process runs it: socket, application, connection to the scheduler, uvicorn.

Owns their order of opening and closing. Runs in any process, with or without Ray.
"""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn

from blockferry.cluster.api.app import create_app
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.config import ApiConfig, ModelConfig

GRACEFUL_STOP_S = 2


class HttpServer:
    """One HTTP server. Binds its port when it is made, so that a busy one is reported before models load."""

    def __init__(self, model: ModelConfig, api: ApiConfig) -> None:
        """Raises OSError with one clear line when the port is taken or the host is not ours."""
        self._model = model
        self._api = api
        self._socket = bind(api.host, api.port)
        self._server: uvicorn.Server | None = None
        self._is_ready = threading.Event()

    @property
    def url(self) -> str:
        """Base URL."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, endpoint: str) -> None:
        """Serve what the scheduler at `endpoint` computes, on this thread, until stop()."""
        asyncio.run(self._serve(endpoint))

    async def _serve(self, endpoint: str) -> None:
        served = ServedModel.load(self._model, chat_template=self._api.chat_template)
        client = ZmqEngineClient(endpoint)
        await client.connect()
        try:
            config = uvicorn.Config(
                create_app(client, served),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACEFUL_STOP_S,
            )
            self._server = uvicorn.Server(config)
            self._is_ready.set()
            # not serve(): that would take over the signals, which belong to the process's owner
            await self._server._serve([self._socket])
        finally:
            client.close()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the server answers within timeout_s. Any thread."""
        return self._is_ready.wait(timeout_s)

    def stop(self) -> None:
        """End run() soon. Any thread."""
        if self._server is not None:
            self._server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with one clear line when the port is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}:{port}: {reason}; set another api.host or api.port") from None
    return listener
