"""Several hosts on one machine: network namespaces joined by a bridge, one sshd in each.

Every host has its own network, PID, UTS and mount namespace with a private /tmp, home and /dev/shm, so that
what `ray up` does to one host (start, stop, state files) cannot touch another. A further namespace without
sshd is the launcher, from which commands are run. Needs root, iproute2, openssh-server and rsync.

    launcher: br0 10.77.0.254 ---- eth0 10.77.0.1 head     and on every host, as Docker leaves it: docker0 172.17.0.1,
                              ---- eth0 10.77.0.2 w1       up, listed before eth0, leading nowhere
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

SUBNET = "10.77.0"
DECOY = "172.17.0.1"  # every host's docker0
LAUNCHER = "launcher"
REQUIRED_TOOLS = ("ip", "unshare", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd")


def missing_tools() -> list[str]:
    """Programs the hosts need that this machine lacks."""
    return [tool for tool in REQUIRED_TOOLS if shutil.which(tool) is None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: its name and address inside the bridge's subnet."""

    name: str
    address: str


class NetnsHosts:
    """Brings hosts up on enter and takes everything down on exit."""

    def __init__(self, scratch: Path, names: Sequence[str], *, keep: Sequence[Path]) -> None:
        self.scratch = scratch
        self.hosts = tuple(Host(name=name, address=f"{SUBNET}.{i + 1}") for i, name in enumerate(names))
        self.key = scratch / "id"
        self._prefix = f"bf{os.getpid() % 10000}"
        # only what a private /tmp or home would hide has to be bound into each host
        self._keep = [
            path.resolve()
            for path in keep
            if path.resolve().is_relative_to("/root") or path.resolve().is_relative_to("/tmp")
        ]
        self._daemons: dict[Host, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> NetnsHosts:
        try:
            self._make_network()
            self._make_keys()
            for host in self.hosts:
                self._start_sshd(host)
            for host in self.hosts:
                self._wait_for_ssh(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the hosts and remove the namespaces. Idempotent."""
        for host in list(self._daemons):
            self._end_processes(host)
        for name in (LAUNCHER, *(host.name for host in self.hosts)):
            subprocess.run(["ip", "netns", "del", self._netns(name)], capture_output=True, check=False)

    def launch(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the launcher's namespaces, which share nothing with the hosts but the bridge."""
        process = self.start(command, env=env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], errors: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a command there. Killing it ends all that it has started."""
        return subprocess.Popen(
            self._enter(LAUNCHER, "exec " + shlex.join(command)),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def ssh(self, host: Host, command: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host, as an operator would."""
        options = ["-q", "-i", str(self.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        argv = ["ip", "netns", "exec", self._netns(LAUNCHER), "ssh", *options, f"root@{host.address}", command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)

    def cut(self, host: Host) -> None:
        """Take a host's link down: nothing gets through in either direction, and nobody is told."""
        _ip("-n", self._netns(LAUNCHER), "link", "set", self._veth(host), "down")

    def mend(self, host: Host) -> None:
        """Take it up again."""
        _ip("-n", self._netns(LAUNCHER), "link", "set", self._veth(host), "up")

    def lose(self, host: Host) -> None:
        """What a power failure does: the host falls silent, and none of its processes lives."""
        self.cut(host)  # first, so that no kernel says goodbye for them
        self._end_processes(host)

    def revive(self, host: Host) -> None:
        """Boot a lost host: its disk is as it was, nothing runs but sshd."""
        self.mend(host)
        self._start_sshd(host)
        self._wait_for_ssh(host)

    @property
    def lost(self) -> list[Host]:
        """Hosts that were lost and not revived."""
        return [host for host in self.hosts if host not in self._daemons]

    def received_bytes(self, host: Host) -> int:
        """Bytes that a host's link to the others has carried to it so far."""
        counter = "/sys/class/net/eth0/statistics/rx_bytes"
        return int(self.ssh(host, f"cat {counter}", timeout_s=20).stdout)

    def _end_processes(self, host: Host) -> None:
        daemon = self._daemons.pop(host)
        daemon.kill()  # --kill-child: ends PID 1 of the host's PID namespace and so all in it
        daemon.wait(timeout=10)

    def _veth(self, host: Host) -> str:
        """The bridge's end of a host's link."""
        return f"{self._prefix}v{self.hosts.index(host)}"

    def _netns(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make_network(self) -> None:
        launcher = self._netns(LAUNCHER)
        _ip("netns", "add", launcher)
        _ip("-n", launcher, "link", "set", "lo", "up")
        _ip("-n", launcher, "link", "add", "br0", "type", "bridge")
        _ip("-n", launcher, "addr", "add", f"{SUBNET}.254/24", "dev", "br0")
        _ip("-n", launcher, "link", "set", "br0", "up")
        for host in self.hosts:
            netns, veth = self._netns(host.name), self._veth(host)
            _ip("netns", "add", netns)
            _ip("-n", netns, "link", "set", "lo", "up")
            _ip("-n", netns, "link", "add", "docker0", "type", "veth", "peer", "name", "container")
            _ip("-n", netns, "addr", "add", f"{DECOY}/16", "dev", "docker0")
            _ip("-n", netns, "link", "set", "docker0", "up")
            _ip("-n", netns, "link", "set", "container", "up")
            _ip("link", "add", veth, "netns", launcher, "type", "veth", "peer", "name", "eth0", "netns", netns)
            _ip("-n", launcher, "link", "set", veth, "master", "br0", "up")
            _ip("-n", netns, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", netns, "link", "set", "eth0", "up")

    def _make_keys(self) -> None:
        for name in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.scratch / name)], check=True)
        authorized = self.scratch / "authorized_keys"
        shutil.copy(self.scratch / "id.pub", authorized)
        authorized.chmod(0o600)
        Path("/run/sshd").mkdir(exist_ok=True)

    def _start_sshd(self, host: Host) -> None:
        config = self.scratch / f"sshd_{host.name}.conf"
        config.write_text(
            f"ListenAddress {host.address}:22\nHostKey {self.scratch / 'hostkey'}\n"
            f"PidFile {self.scratch / f'sshd_{host.name}.pid'}\n"
            f"AuthorizedKeysFile {self.scratch / 'authorized_keys'}\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUsePAM no\n"
            "PrintMotd no\nSetEnv HF_HUB_OFFLINE=1\n"
            "MaxStartups 100\nMaxSessions 100\n"
        )
        script = f"exec /usr/sbin/sshd -D -e -f {config}"
        with (self.scratch / f"sshd_{host.name}.log").open("ab") as log:
            self._daemons[host] = subprocess.Popen(self._enter(host.name, script), stdout=log, stderr=log)

    def _enter(self, name: str, script: str) -> list[str]:
        """The command line that runs a shell script inside a host's namespaces."""
        root = self.scratch / f"fs_{name}"
        for folder in ("tmp", "root"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "root" / ".bashrc").touch()
        binds = []
        for path in (*self._keep, self.scratch.resolve()):
            inside = root / path.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            binds.append(f"mount --rbind {shlex.quote(str(path))} {shlex.quote(str(inside))}")
        setup = " && ".join(
            [
                f"hostname {name}",
                *binds,
                f"mount --rbind {root}/root /root",
                f"mount --rbind {root}/tmp /tmp",
                "mount -t tmpfs -o size=2g tmpfs /dev/shm",
                "cd /",
                script,
            ]
        )
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        return ["ip", "netns", "exec", self._netns(name), *unshare, "bash", "-c", setup]

    def _wait_for_ssh(self, host: Host) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            probe = ["ip", "netns", "exec", self._netns(LAUNCHER), "bash", "-c", f"echo > /dev/tcp/{host.address}/22"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise TimeoutError(f"sshd of {host.name} did not listen on {host.address}:22 within 20 s")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def python_folders(root: Path, models: Path) -> list[Path]:
    """Folders that every host must see to run this checkout: interpreter, checkout, models."""
    return [Path(sys.base_prefix), root, models]
