"""A served deployment that loses its parts, one after the other, and is scaled and restarted: it goes on answering.

The tests share one deployment and run in this order; each leaves it whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.tiny_tokenizers import byte_level

from blockferry.cluster.run_record import RunRecord, find_record
from blockferry.engine.config import cache_dir

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKFERRY = [sys.executable, "-c", "from blockferry.cluster.cli import main; main()"]
NAME = f"supervised-{os.getpid()}"
LIMIT_S = 240.0  # for anything on a busy machine
PROMPT = "one two three four five six seven eight nine ten eleven twelve"
NUM_STREAMS, NUM_TOKENS = 6, 150
DEPLOYMENT = """
model: {{path: {model}, dtype: float32}}
cache: {{num_blocks: 96}}
api: {{port: 0}}
health: {{resume_timeout_s: 200}}
instances:
  - {{role: prefill, resources: {{num_cpus: 0.4}}}}
  - {{role: decode, resources: {{num_cpus: 0.4}}}}
"""


@dataclasses.dataclass(kw_only=True)
class Served:
    """A running `blockferry serve`, and other shells."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    errors: Path
    url: str
    expected: str = ""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BLOCKFERRY, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def record(self) -> RunRecord:
        record = find_record(NAME)
        assert record is not None
        return record

    def pids(self, actor: str) -> list[int]:
        """Processes of an actor class, the oldest first."""
        found = [
            one.pid
            for one in psutil.Process(self.process.pid).children(recursive=True)
            if one.status() != psutil.STATUS_ZOMBIE and actor in " ".join(one.cmdline())
        ]
        return sorted(found)

    def listed(self) -> list[str]:
        """Ids of the instances that the scheduler lists, as metrics tell; empty while nobody answers."""
        with contextlib.suppress(httpx.TransportError):
            text = httpx.get(f"{self.url}/metrics", timeout=30).text
            return sorted(re.findall(r'num_requests_running\{engine="([^"]+)"', text))
        return []

    def answer(self) -> str | None:
        """The text of a short completion; None when there is none."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
            return reply.json()["choices"][0]["text"] if reply.status_code == 200 else None
        return None

    def stream(self, number: int) -> str:
        """The text of a long streamed completion, or what went wrong."""
        body = {
            "model": "tiny",
            "prompt": f"{number} {PROMPT}",
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_S) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[len("data: ") :])
                    if "error" in event:
                        return f"error: {event['error']['message']}"
                    text += event["choices"][0]["text"]
        return text

    @contextlib.contextmanager
    def under_streams(self) -> Iterator[None]:
        """Streams while the body runs, one after the other and several at once; all end as they would have."""
        expected = [self.stream(number) for number in range(NUM_STREAMS)]
        is_over = False

        def again(number: int) -> list[str]:
            wrong = []
            while not is_over:
                text = self.stream(number)
                if text != expected[number]:
                    wrong.append(text)
            return wrong

        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(again, number) for number in range(NUM_STREAMS)]
            try:
                yield
            finally:
                is_over = True
            assert [stream.result() for stream in streams] == [[]] * NUM_STREAMS


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("supervised")
    model = make_checkpoint(folder / "tiny", "llama", vocab_size=400)
    byte_level()._backend.save(str(model / "tokenizer.json"))
    file = folder / "deployment.yaml"
    file.write_text(f"name: {NAME}\n{DEPLOYMENT.format(model=model)}")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    errors = folder / "errors.log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [*BLOCKFERRY, "serve", str(file)], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "is served at" in line, errors.read_text()
        one = Served(process=process, environment=environment, errors=errors, url=line.split()[-1])
        one.expected = one.answer() or ""
        assert one.expected
        yield one
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 128 + signal.SIGTERM
        _, left = psutil.wait_procs(descendants, timeout=5)
        assert left == []
        assert not [*(cache_dir() / "run").glob(f"{NAME}@*")]
        assert "Traceback" not in errors.read_text()
    finally:
        print(errors.read_text())
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=LIMIT_S)
        process.stdout.close()


def until(condition: Callable[[], Any], *, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.2)


def test_commands_that_cannot_be_are_refused_and_change_nothing(served: Served) -> None:
    for arguments, words in (
        (["scale", "nobody", "prefill=2"], "no deployment is named 'nobody'; running here: "),
        (["scale", NAME, "encode=2"], "is no ROLE=COUNT"),
        (["scale", NAME, "mixed=1"], "no instance has the role 'mixed'"),
        (["scale", NAME, "decode=0"], "nothing could be served with prefill=1, decode=0"),
        (["scale", NAME, "prefill=400"], "399 more instance(s) need 159.6 CPU; the cluster has"),
    ):
        done = served.command(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
    assert served.listed() == ["decode-0", "prefill-0"]


def test_a_killed_worker_is_replaced_without_losing_a_request(served: Served) -> None:
    with served.under_streams():
        os.kill(served.pids("WorkerActor")[0], signal.SIGKILL)
        until(lambda: {"prefill-0", "decode-0"} - set(served.listed()) and len(served.listed()) == 2)
    assert served.answer() == served.expected


def test_it_is_scaled_up_and_down_without_losing_a_request(served: Served) -> None:
    with served.under_streams():
        up = served.command("scale", NAME, "prefill=2")
        assert up.returncode == 0, up.stderr
        assert len(up.stdout.split(",")) == 3
        down = served.command("scale", NAME, "prefill=1", "--drain-timeout", "30")
        assert down.returncode == 0, down.stderr
        assert "has left" in down.stderr
    assert len(served.listed()) == 2


def test_every_instance_is_replaced_without_losing_a_request(served: Served) -> None:
    before = served.listed()
    with served.under_streams():
        done = served.command("restart", NAME, "--drain-timeout", "30")
        assert done.returncode == 0, done.stderr
    assert len(served.listed()) == 2
    assert not set(before) & set(served.listed())


def test_a_killed_http_server_answers_again_at_the_same_place(served: Served) -> None:
    os.kill(served.pids("ApiActor")[0], signal.SIGKILL)
    until(lambda: served.answer() is None)
    until(lambda: served.answer() == served.expected)


def test_a_killed_scheduler_is_replaced_without_losing_a_request_and_the_workers_go_on(served: Served) -> None:
    workers, endpoint = served.pids("WorkerActor"), served.record().client_endpoint
    with served.under_streams():
        os.kill(served.pids("SchedulerActor")[0], signal.SIGKILL)
        until(lambda: served.record().client_endpoint != endpoint)
        until(lambda: served.answer() == served.expected)
    assert served.pids("WorkerActor") == workers


def test_scheduler_and_http_server_that_die_together_are_both_replaced(served: Served) -> None:
    for actor in ("SchedulerActor", "ApiActor"):
        os.kill(served.pids(actor)[0], signal.SIGKILL)
    until(lambda: served.answer() is None)
    until(lambda: served.answer() == served.expected)
