"""A load of streams from the launcher's namespace, beside which a test breaks hosts; see support.stream_load."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.netns_hosts import NetnsHosts
from support.ray_up import BIN

PROGRAM = Path(__file__).parent / "stream_load.py"
_ASK = """
import httpx, sys
url, body = sys.argv[1], sys.argv[2]
answer = httpx.post(url, content=body, timeout=60) if body else httpx.get(url, timeout=60)
print(answer.status_code, answer.text)
"""


def ask(hosts: NetnsHosts, url: str, body: str = "") -> str:
    """Status and text of a GET, or of a POST where there is a body, from the launcher's namespace."""
    done = hosts.launch([str(BIN / "python"), "-c", _ASK, url, body], env={}, timeout_s=90)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """Who asks what."""

    url: str
    prompts: Sequence[Sequence[int]]
    num_streams: int  # all at once
    max_tokens: int
    limit_s: float
    watch_after_s: float = 0.0  # how long /health is watched after the last stream has ended
    expected: Sequence[str] = ()  # the fault-free texts, where they are known


class RunningLoad:
    """Streams under way in the launcher's namespace."""

    def __init__(self, hosts: NetnsHosts, load: StreamLoad) -> None:
        file = hosts.scratch / "streams.json"
        file.write_text(json.dumps(dataclasses.asdict(load)))
        self._load = load
        self._errors = (hosts.scratch / "streams.log").open("w+")
        self._process = hosts.start([str(BIN / "python"), str(PROGRAM), str(file)], env={}, errors=self._errors)
        self.expected: list[str] = self._line()["expected"]

    def wait_until_all_have_begun(self) -> int:
        """How many of them have not ended yet."""
        num_open: int = self._line()["begun"]
        return num_open

    def finish(self) -> LossOutcome:
        """Wait for the last stream."""
        found = self._line()
        self.close()
        return LossOutcome(expected=self.expected, streams=found["streams"], health=found["health"])

    def close(self) -> None:
        """End it. Idempotent."""
        if not self._errors.closed:
            self._process.kill()
            self._process.communicate()
            self._errors.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise AssertionError(f"the load ended early: {self._errors.read()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossOutcome:
    """What became of every stream."""

    expected: Sequence[str]
    streams: Sequence[dict[str, Any]]
    health: Sequence[dict[str, Any]]

    @property
    def exact(self) -> list[dict[str, Any]]:
        """Streams with the whole fault-free text and no error."""
        return [one for one in self.streams if not one["error"] and one["text"] == self.expected[one["prompt"]]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Streams with a beginning of the fault-free text, and then an error."""
        return [one for one in self.streams if one["error"] and self.expected[one["prompt"]].startswith(one["text"])]

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """All others: there must be none."""
        return [one for one in self.streams if one not in self.exact and one not in self.failed]
