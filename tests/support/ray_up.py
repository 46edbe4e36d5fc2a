"""A Ray cluster of three hosts, brought up by `ray up` with the shipped file, and commands on its head."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from support.netns_hosts import LAUNCHER, Host, NetnsHosts, missing_tools, python_folders

from blockferry.engine.config import cache_dir

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def cluster_yaml(hosts: NetnsHosts) -> dict[str, Any]:
    """The shipped file, with these hosts and with the environment that they share already."""
    head, *workers = hosts.hosts
    text = (ROOT / "configs/ray/local.yaml").read_text().replace("~/blockferry-venv/bin", str(BIN))
    document: dict[str, Any] = yaml.safe_load(text.replace("$HOME/blockferry-venv/bin", str(BIN)))
    document["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    document["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    document["setup_commands"] = [command for command in document["setup_commands"] if ".bashrc" in command]
    del document["file_mounts"]["~/blockferry"]
    return document


def launcher_env() -> dict[str, str]:
    """What the shipped file says the launching shell needs, and the programs that Ray calls."""
    return {"RAY_UP_enable_autoscaler_v2": "0", "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}


def cluster_file(hosts: NetnsHosts) -> Path:
    return hosts.scratch / "cluster.yaml"


def ray_command(hosts: NetnsHosts, command: str) -> subprocess.CompletedProcess[str]:
    options = ["-y", *(["--no-config-cache"] if command == "up" else [])]
    arguments = [str(BIN / "ray"), command, *options, str(cluster_file(hosts))]
    return hosts.launch(arguments, env=launcher_env(), timeout_s=180)


def wait_until_gone(hosts: NetnsHosts, host: Host, command: str) -> None:
    """Until a command that lists what should go lists nothing."""
    deadline = time.monotonic() + 60
    while left := hosts.ssh(host, command, timeout_s=20).stdout:
        assert time.monotonic() < deadline, (host.name, left)
        time.sleep(1)


@contextlib.contextmanager
def three_hosts(scratch: Path) -> Iterator[NetnsHosts]:
    """Hosts head, w1 and w2; afterwards `ray down` has left nothing on them."""
    assert missing_tools() == [], f"install iproute2, openssh-server and rsync: {missing_tools()} not found"
    with NetnsHosts(scratch, ["head", "w1", "w2"], keep=python_folders(ROOT, cache_dir())) as hosts:
        token = scratch / f"fs_{LAUNCHER}" / "root" / ".ray" / "auth_token"
        token.parent.mkdir(parents=True)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        cluster_file(hosts).write_text(yaml.safe_dump(cluster_yaml(hosts)))
        up = ray_command(hosts, "up")
        assert up.returncode == 0, up.stdout[-3000:] + up.stderr[-3000:]
        yield hosts
        down = ray_command(hosts, "down")
        assert down.returncode == 0, down.stderr[-3000:]
        for host in hosts.hosts:
            wait_until_gone(hosts, host, "pgrep -x 'raylet|gcs_server'")


def on_head(hosts: NetnsHosts, command: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    head: Host = hosts.hosts[0]
    return hosts.ssh(head, command, timeout_s=timeout_s)


def wait_for_nodes(hosts: NetnsHosts, count: int) -> None:
    script = "import ray; ray.init(address='auto', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
    deadline = time.monotonic() + 90
    answer = ""
    while time.monotonic() < deadline:
        answer = on_head(hosts, f'{BIN}/python -c "{script}"', timeout_s=60).stdout
        if answer.strip().endswith(str(count)):
            return
    raise AssertionError(f"{count} nodes did not join within 90 s: {answer}")


@contextlib.contextmanager
def serving(hosts: NetnsHosts, deployment: str) -> Iterator[Path]:
    """`ray exec cluster.yaml "blockferry serve ..."` of a deployment file with this text; yields the file."""
    config, log = hosts.scratch / "deployment.yaml", hosts.scratch / "serve.log"
    config.write_text(deployment)
    serve = [str(BIN / "ray"), "exec", str(cluster_file(hosts)), f"blockferry serve {config} --address auto"]
    log.write_text("")
    process = hosts.start(["bash", "-c", f"exec {shlex.join(serve)} >{log} 2>&1"], env=launcher_env())
    try:
        deadline = time.monotonic() + 240
        while "is served at" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(1)
        yield config
    finally:
        on_head(hosts, "pkill -TERM -f 'blockferry [s]erve'", timeout_s=20)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def status_of(hosts: NetnsHosts) -> dict[str, Any]:
    """What `blockferry status` says on the head of the one deployment there."""
    asked = on_head(hosts, f"{BIN}/blockferry status --json", timeout_s=60)
    found: list[dict[str, Any]] = json.loads(asked.stdout)["deployments"] if asked.stdout else []
    assert len(found) == 1, (asked.stdout, asked.stderr, (hosts.scratch / "serve.log").read_text())
    return found[0]
