"""Transfers of real models that fail at every point: tokens are those of transformers, and all blocks come back."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faulty_transport import Faults, FaultyTransport, Point
from support.local_engine import EngineOptions
from support.local_pair import LocalPair
from support.tiny_families import checkpoint, make_prompt, reference_tokens

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "gemma3_text", "qwen3_next")  # dense; windows; states
NUM_OUTPUT = 8
PROMPTS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate((70, 33, 90))]
SMALL_BATCHES = PdWorkerOptions(limits=TransferLimits(batch_bytes=8192))
OPTIONS = EngineOptions(enable_caching=False)  # every prompt travels every time


@functools.cache
def answers(path: Path) -> list[list[int]]:
    return [reference_tokens(path, prompt, NUM_OUTPUT) for prompt in PROMPTS]


class FaultyPair:
    """A pair of instances whose connections fail when told to."""

    def __init__(self, path: Path, mode: TransferMode, overlap: Overlap) -> None:
        self.path, self.faults = path, Faults()
        self.pair = LocalPair(
            path,
            OPTIONS,
            mode=mode,
            overlap=overlap,
            transport=lambda fabric: FaultyTransport(fabric, self.faults),
            connector=SMALL_BATCHES,
        )

    def check_answers(self) -> None:
        assert self.pair.generate(PROMPTS, NUM_OUTPUT) == answers(self.path)
        deadline_s = time.monotonic() + 20
        while any(kv.num_free_blocks != kv.num_usable_blocks for kv in self.pair.ledgers.values()):
            assert time.monotonic() < deadline_s, self.pair.central.status()
            self.pair._pass()
        handoffs = self.pair.central.status()["handoffs"]
        assert not any(handoffs.values()), handoffs


KINDS = [(TransferMode.PUSH, Overlap.LAYERS), (TransferMode.PUSH, Overlap.NONE), (TransferMode.PULL, Overlap.CHUNKS)]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=KINDS, ids=[f"{mode}-{overlap}" for mode, overlap in KINDS])
def faulty(request: pytest.FixtureRequest, path: Path) -> Iterator[FaultyPair]:
    made = FaultyPair(path, *request.param)
    yield made
    made.pair.close()


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("point", [one for one in Point if one is not Point.CONNECT])
def test_prompts_whose_blocks_do_not_arrive_are_computed_anew(faulty: FaultyPair, point: Point, after: int) -> None:
    before = faulty.faults.num_failures
    faulty.faults.fail(point, after=after)
    faulty.check_answers()
    assert faulty.faults.num_failures == before + 1
    assert any("told to fail" in one for one in faulty.pair.failures)


def test_prompts_are_computed_anew_while_nothing_arrives_at_all(faulty: FaultyPair) -> None:
    faulty.faults.fail(Point.CONNECT, times=1000)
    faulty.faults.fail(Point.FLUSH)
    faulty.check_answers()
    faulty.faults.fail(Point.CONNECT, times=0)
    faulty.check_answers()


def test_reports_that_come_twice_change_nothing(faulty: FaultyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    on_transfer = faulty.pair.central.on_transfer

    def twice(event):  # type: ignore[no-untyped-def]
        output = on_transfer(event)
        assert not on_transfer(event)
        return output

    monkeypatch.setattr(faulty.pair.central, "on_transfer", twice)
    faulty.check_answers()
