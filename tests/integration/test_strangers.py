"""Strangers at every port of a deployment that serves: refused, logged once, and nobody else notices."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from support.checkpoints import make_checkpoint
from support.cluster import LiveDeployment, live_deployment, wait_until_idle
from support.strangers import Port, attack, attacks, ports
from support.tiny_tokenizers import byte_level

from blockferry.cluster.secret import ClusterSecret

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

DEPLOYMENT = """
model: {{path: {path}, dtype: float32, max_model_len: 256}}
cache: {{num_blocks: 200}}
instances: [{{role: prefill}}, {{role: decode}}]
connector: {{ucx_options: {{TLS: "tcp,self"}}}}
api: {{port: 0, api_key_file: keys}}
"""
KEY = {"Authorization": "Bearer open sesame"}
BODY = {"model": "tiny", "prompt": list(range(20, 90)), "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    folder = tmp_path_factory.mktemp("strangers")
    path = make_checkpoint(folder / "tiny", "llama", vocab_size=400)
    byte_level()._backend.save(str(path / "tokenizer.json"))
    (folder / "keys").write_text("open sesame\n")
    with live_deployment(DEPLOYMENT.format(path=path), folder, with_api=True) as deployment:
        yield deployment


class Asker:
    """Asks for one completion after the other, on a thread, and keeps the answers."""

    def __init__(self, url: str) -> None:
        self.answers: list[str] = []
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self) -> str:
        answer = httpx.post(f"{self._url}/v1/completions", json=BODY, headers=KEY, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.answers.append(self.ask())
            except (httpx.HTTPError, AssertionError) as error:
                self.answers.append(repr(error))

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_over.set()
        self._thread.join()


def is_schedulers(port: Port) -> bool:
    return isinstance(port.address, str) and "blockferry-" in port.address


def knock_with_another_secret(port: Port) -> None:
    """A whole client of another deployment."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        ClusterSecret.make().present(stranger)
        stranger.connect(f"ipc://@{str(port.address)[1:]}")
        stranger.send_multipart([b"h", b"\x92\x06\x80"])
        assert not stranger.poll(300), "a stranger was answered"
    context.term()


def memory_of(found: list[Port]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in {port.pid for port in found})


def warnings_of(pid: int) -> list[str]:
    """What a process has logged of refusals."""
    (file,) = {path.resolve() for path in Path("/tmp").glob(f"blockferry-*/session_*/logs/worker-*-{pid}.err")}
    return [line for line in file.read_text().splitlines() if "refused a connection" in line]


def test_strangers_at_every_port_are_refused_and_nobody_else_notices(live: LiveDeployment) -> None:
    found = ports()
    assert {port.actor for port in found} >= {"ApiActor", "SchedulerActor", "WorkerActor"}
    asker = Asker(live.running.url)
    expected = asker.ask()
    before = memory_of(found)
    with asker, contextlib.ExitStack() as half_open:
        for seed in range(3):
            for port in found:
                for data in attacks(seed):
                    stranger = attack(port, data)
                    half_open.callback(stranger.close) if seed == 1 else stranger.close()
        for port in found:
            if is_schedulers(port):
                knock_with_another_secret(port)
        time.sleep(1)
    assert len(asker.answers) > 1
    assert set(asker.answers) == {expected}
    assert asker.ask() == expected
    assert memory_of(found) - before < 100 << 20
    assert {port.pid for port in ports()} == {port.pid for port in found}
    status = wait_until_idle(live)
    assert status["healthy"], status["reason"]
    assert status["num_refused_connections"] >= 2 * 3 * 5  # two sockets; some attacks end before they say anything
    (scheduler,) = {port.pid for port in found if port.actor == "SchedulerActor"}
    assert 1 <= len(warnings_of(scheduler)) <= 2  # of this user, and of whoever had left before he was seen


def test_without_the_key_the_api_answers_probes_only(live: LiveDeployment) -> None:
    url = live.running.url
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/metrics").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer guess"}).status_code == 401
