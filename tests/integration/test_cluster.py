"""The command on a real local Ray cluster: found from other shells, killed in parts, stopped without a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
from support.checkpoints import edit_config, make_checkpoint
from support.tiny_tokenizers import byte_level

from blockferry.cluster import launch, placement, ray_session
from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.listen import bind
from blockferry.connectors.transport.hosts import Hosts

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(400)]

BLOCKFERRY = [sys.executable, "-c", "from blockferry.cluster.cli import main; main()"]
LIMIT_S = 180.0  # for anything on a busy machine; what has to be quick is measured apart
PD = "instances: [{role: prefill}, {role: decode}]\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", vocab_size=400)
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"BLOCKFERRY_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def write_deployment(folder: Path, model: Path, text: str = PD, *, port: int = 0) -> Path:
    file = folder / "deployment.yaml"
    file.write_text(
        f"name: cluster-{os.getpid()}\nmodel: {{path: {model}, dtype: float32}}\n"
        f"cache: {{num_blocks: 64}}\napi: {{port: {port}}}\nhealth: {{resume_timeout_s: 3}}\n{text}"
    )
    return file


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*BLOCKFERRY, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@dataclasses.dataclass(kw_only=True)
class Server:
    """A running `blockferry serve`."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    file: Path
    url: str
    descendants: list[psutil.Process]
    ray_folder: str

    def actor(self, name: str) -> psutil.Process:
        """The process of an actor class; the last started one of several."""
        found = [one for one in self.descendants if one.is_running() and name in " ".join(one.cmdline())]
        return max(found, key=lambda one: one.pid)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another shell."""
        return subprocess.run(
            [*BLOCKFERRY, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def end(self, number: int) -> str:
        """Send a signal, wait for the end; returns stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return errors


@pytest.fixture
def server(tmp_path: Path, model: Path, environment: dict[str, str]) -> Iterator[Server]:
    file = write_deployment(tmp_path, model)
    process = subprocess.Popen(
        [*BLOCKFERRY, "serve", str(file)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is served at" in line, process.communicate(timeout=LIMIT_S)
        url = line.split()[-1]
        descendants = psutil.Process(process.pid).children(recursive=True)
        (ray_folder,) = {
            part.split("=", 1)[1]
            for one in descendants
            for part in one.cmdline()
            if part.startswith(("--temp_dir=", "--temp-dir="))
        }
        yield Server(
            process=process,
            environment=environment,
            file=file,
            url=url,
            descendants=descendants,
            ray_folder=ray_folder,
        )
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=LIMIT_S)


def traces_of(server: Server) -> list[str]:
    """What a stopped server has left: processes, temporary folders, shared memory, notes."""
    processes = [f"{one.pid} {one.name()}" for one in server.descendants if is_alive(one)]
    notes = list(Path(server.environment["BLOCKFERRY_CACHE"]).glob("run/*.json"))
    folders = [server.ray_folder] if Path(server.ray_folder).exists() else []
    return [*processes, *folders, *map(str, notes)]


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], Any], *, limit_s: float) -> float:
    """Seconds until the condition held."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < limit_s, f"not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - started_s


def health(server: Server) -> int:
    try:
        return httpx.get(f"{server.url}/health", timeout=30).status_code
    except httpx.TransportError:
        return 0


@contextlib.contextmanager
def endless_stream(server: Server) -> Iterator[Iterator[str]]:
    """Lines of a completion that goes on for as long as the model can."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_other_shells_find_it_and_sigterm_leaves_no_trace(server: Server) -> None:
    status = server.run("status", "--json")
    assert status.returncode == 0, status.stderr
    (found,) = json.loads(status.stdout)["deployments"]
    assert (found["healthy"], found["url"]) == (True, server.url)
    assert {one["instance_id"] for one in found["workers"]} == {"prefill-0", "decode-0"}
    assert {one["plan"]["num_blocks"] for one in found["instances"]} == {64}

    answer = server.run("generate", str(server.file), "hello there", "--raw", "--max-tokens", "4", "--json")
    assert answer.returncode == 0, answer.stderr
    (output,) = json.loads(answer.stdout)["outputs"]
    assert len(output["token_ids"]) == 4
    assert output["metrics"]["transfer_blocks"] > 0

    errors = server.end(signal.SIGTERM)
    assert server.process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in errors
    assert "Traceback" not in errors
    assert traces_of(server) == []


def test_dead_worker_is_noticed_within_seconds_and_health_says_so(server: Server) -> None:
    assert health(server) == 200
    with endless_stream(server) as lines:
        # prefill and decode are alike from outside: killing both leaves nothing that could go on
        for worker in [one for one in server.descendants if "WorkerActor" in " ".join(one.cmdline())]:
            worker.kill()
        seconds = until(lambda: health(server) == 503, limit_s=30)
        rest = list(lines)
    assert seconds < 10
    assert any("failed" in line for line in rest)


@pytest.mark.parametrize("phase", ["starting Ray", "starting workers"])
def test_signal_during_start_leaves_no_trace(
    phase: str, tmp_path: Path, model: Path, environment: dict[str, str]
) -> None:
    file = write_deployment(tmp_path, model)
    process = subprocess.Popen(
        [*BLOCKFERRY, "serve", str(file)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while phase not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(1.0)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in errors
    assert [one for one in descendants if is_alive(one)] == []


def fails_with(file: Path, environment: dict[str, str]) -> str:
    """The one line that a failing serve ends with."""
    done = run(environment, "serve", str(file))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def test_busy_port_is_one_clear_line(tmp_path: Path, model: Path, environment: dict[str, str]) -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        line = fails_with(write_deployment(tmp_path, model, port=port), environment)
    assert f"cannot listen on 127.0.0.1:{port}" in line


def test_corrupt_weights_are_one_clear_line(tmp_path: Path, model: Path, environment: dict[str, str]) -> None:
    broken = copied(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 1000)
    line = fails_with(write_deployment(tmp_path, broken), environment)
    assert "model.safetensors is damaged" in line


def test_weights_that_fit_no_model_are_one_clear_line(tmp_path: Path, model: Path, environment: dict[str, str]) -> None:
    odd = copied(model, tmp_path / "odd")
    edit_config(odd, intermediate_size=104)
    line = fails_with(write_deployment(tmp_path, odd), environment)
    assert "checking the checkpoint" in line
    assert "mlp" in line


def copied(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_missing_resource_is_named_within_seconds(tmp_path: Path, model: Path) -> None:
    text = "instances: [{role: mixed, replicas: 2, resources: {num_cpus: 1, fpga: 1}}]\n"
    deployment = load_deployment(write_deployment(tmp_path, model, text))
    session = ray_session.start_local({"CPU": 1.0})
    try:
        started_s = time.monotonic()
        with pytest.raises(placement.PlacementError, match="fpga"):
            launch.launch(deployment, lambda _progress: None, hosts=Hosts.ONE, with_api=False)
        assert time.monotonic() - started_s < 10
    finally:
        session.close()
