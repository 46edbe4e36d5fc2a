"""Notes of running deployments, so that another shell on this machine finds them: one JSON file each.

Owns the folder `run` in the cache folder, which several hosts may share: a process number means something on its own
host only, so each reads its own notes. A note outlives a killed process; readers drop the stale ones. Nobody but its
owner may read a note: it holds the deployment's secret.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from pathlib import Path

from blockferry.cluster.secret import ClusterSecret
from blockferry.cluster.sockets import Endpoint
from blockferry.engine.config import cache_dir

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How to reach one running deployment."""

    name: str
    config_file: str
    model_path: str
    ray_address: str
    client_endpoint: str
    secret: str = dataclasses.field(repr=False)  # a ClusterSecret's text
    url: str  # "" without an HTTP server
    pid: int  # of the process that brought it up
    ray_auth_mode: str = ""  # what RAY_AUTH_MODE must be to connect there
    control: str = ""  # path of the socket on which that process takes commands; "": it takes none

    @property
    def client(self) -> Endpoint:
        """Where clients on this machine connect."""
        return Endpoint(url=self.client_endpoint, secret=ClusterSecret(text=self.secret))


def _folder() -> Path:
    return cache_dir() / "run"


def _this_host() -> str:
    """Differs between machines, and between containers that count processes for themselves."""
    return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"


def control_path(name: str) -> Path:
    """Where this host's process that serves a deployment takes commands."""
    return _folder() / f"{name}@{_this_host()}.sock"


def write_record(record: RunRecord) -> Path:
    """Leave a note; whoever writes it removes it."""
    _folder().mkdir(parents=True, exist_ok=True)
    path = _folder() / f"{record.name}@{_this_host()}.json"
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(dataclasses.asdict(record), indent=2))
    draft.replace(path)
    return path


def change_record(name: str, **changes: str) -> None:
    """Change fields of the note that this process has left."""
    record = find_record(name)
    if record is not None and record.pid == os.getpid():
        write_record(dataclasses.replace(record, **changes))  # type: ignore[arg-type]  # the fields that are text


def read_records() -> list[RunRecord]:
    """Notes of deployments whose process lives; removes this host's of dead ones and skips another release's."""
    found = []
    for path in sorted(_folder().glob(f"*@{_this_host()}.json")):
        try:
            values = json.loads(path.read_text())
            if not _is_alive(int(values["pid"])):
                path.unlink(missing_ok=True)
                continue
            found.append(RunRecord(**values))
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("skipped %s: %s", path, error)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    return True


def find_record(name: str) -> RunRecord | None:
    """The note of one running deployment."""
    return next((record for record in read_records() if record.name == name), None)
