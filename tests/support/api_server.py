"""The HTTP application on a real loopback port, a tiny engine behind it."""

import socket
import threading
import time

import uvicorn
from support.tiny_engine import served_model

from blockferry.cluster.api.app import create_app


class ApiServer:
    """uvicorn on a free loopback port, in a thread of its own."""

    def __init__(self, engine, **model_changes):
        self.engine = engine
        app = create_app(engine, served_model(**model_changes))
        config = uvicorn.Config(app, http="h11", log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self):
        self._thread.start()
        deadline_s = time.monotonic() + 20
        while not self._server.started and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self

    def __exit__(self, *_exc):
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
