"""A served deployment under a long load, watched from outside: its processes' memory, and whom to kill next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
from support.fault_load import Load, Outcome, run_load

from blockferry.cluster.bench.survival_victims import Served

SAMPLE_S = 0.1
MIB = 1 << 20


@dataclasses.dataclass(slots=True, kw_only=True)
class Memory:
    """Resident bytes over time of the processes that live as long as the deployment."""

    samples: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def growth_bytes(self) -> Mapping[str, float]:
        """By process: median of the last quarter less that of the second, when all is warm."""
        return {
            name: statistics.median(values[-len(values) // 4 :])
            - statistics.median(values[len(values) // 4 : len(values) // 2])
            for name, values in self.samples.items()
            if len(values) >= 8
        }


@contextlib.contextmanager
def watched(pids: Mapping[str, int]) -> Iterator[Memory]:
    """Sample memory beside the body."""
    memory = Memory(samples={name: [] for name in pids})
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    memory.samples[name].append(process.memory_info().rss)

    thread = threading.Thread(target=sample, name="memory")
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()


def run_beside(load: Load, disturb: Callable[[], None], *, every_s: float) -> Outcome:
    """A load, with something done to the deployment every so often until it ends, and once at least."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(run_load(load))), name="load")
    thread.start()
    next_s = time.monotonic() + min(every_s, 1.0)  # the shortest load takes a few seconds
    num_disturbances = 0
    while thread.is_alive():
        thread.join(0.2)
        if time.monotonic() > next_s and thread.is_alive():
            disturb()
            num_disturbances += 1
            next_s = time.monotonic() + every_s
    assert found, "the load failed"
    assert num_disturbances, "the load was over before anything was done to the deployment"
    return found[0]


def kill_in_turn(served: Served, kinds: Iterator[str], limit_s: float) -> Callable[[], None]:
    """Kills the next kind's first instance each time, and waits until it is replaced."""

    def disturb() -> None:
        (victim,) = served.victims([next(kinds)])
        victim.kill()
        deadline_s = time.monotonic() + limit_s
        while not victim.is_replaced():
            assert time.monotonic() < deadline_s, f"{victim.name} was not replaced within {limit_s:g} s"
            time.sleep(0.3)

    return disturb


def settle(served: Served, limit_s: float) -> dict[str, object]:
    """The first status in which nothing runs, every block is free, and the ledgers were audited since."""
    deadline_s = time.monotonic() + limit_s
    before = served.status()
    assert before is not None
    while time.monotonic() < deadline_s:
        status = served.status()
        if status is not None and not status["num_unfinished"] and not any(status["handoffs"].values()):
            is_free = all(one["num_free_blocks"] == one["num_blocks"] for one in status["instances"])
            if is_free and status["num_audits"] > 0 and status["healthy"]:
                return status
        time.sleep(0.3)
    raise AssertionError(f"not at rest within {limit_s:g} s: {served.status()}")


def write_config(path: Path, folder: Path, name: str) -> Path:
    """Two prefill and two decode instances of a tiny checkpoint."""
    config = folder / f"{name}.yaml"
    config.write_text(
        f"""
name: {name}
model: {{path: {path}, dtype: float32, max_model_len: 256}}
cache: {{memory: 32MiB}}
scheduler: {{max_num_seqs: 16, max_num_batched_tokens: 256}}
instances:
  - {{role: prefill, replicas: 2, resources: {{num_cpus: 0.2}}}}
  - {{role: decode, replicas: 2, resources: {{num_cpus: 0.2}}}}
connector: {{lease_s: 6, transfer_timeout_s: 2}}
health: {{silence_limit_s: 10}}
api: {{port: 0, num_cpus: 0}}
""",
        encoding="utf-8",
    )
    return config
