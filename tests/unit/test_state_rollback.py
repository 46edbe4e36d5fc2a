"""Recurrent families with drafts, on the real scheduler and ledger: tokens and cached states are those without."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_families
from support.known_drafts import KnownDrafts
from support.local_engine import EngineOptions, LocalEngine, nan_memory, start_worker
from support.tiny_families import make_prompt

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.worker.page_views import PageViews
from blockferry.engine.worker.pool_memory import page_dtypes
from blockferry.engine.worker.proposers import make_proposer

FAMILIES = [name for name, family in tiny_families.FAMILIES.items() if family.has_state]
NUM_OUTPUT = 33
PROMPTS = [make_prompt(seed, length) for seed, length in enumerate((5, 21, 40, 16, 8))]
SPECULATION = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=3, is_adaptive=False)
PLAIN = EngineOptions(max_model_len=96, memory_bytes=1 << 23, block_size=8)
RIGHT, WRONG, PARTLY_RIGHT = [True], [False], [True, True, False, True, False, True, True]


class Run:
    """An engine, its worker and the pool between them."""

    def __init__(self, path: Path, options: EngineOptions, drafts: KnownDrafts | None = None) -> None:
        self.pool = np.empty(0, np.uint8)
        self.worker = start_worker(
            path, options, make_proposer=make_proposer if drafts is None else drafts.of, allocate=self.allocate
        )
        self.engine = LocalEngine(path, options, self.worker)
        (stage,) = self.engine.plan.stages
        self.views = PageViews(
            stage, torch.from_numpy(self.pool), layout=options.layout, dtypes=page_dtypes(stage, torch.float32)
        )

    def allocate(self, num_bytes: int) -> np.ndarray:
        self.pool = nan_memory(num_bytes)
        return self.pool

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        return self.engine.generate(prompts, NUM_OUTPUT)

    def cached_states(self, tokens: list[int]) -> tuple[int, list[torch.Tensor]]:
        """Tokens of the longest hit on a sequence, and all layers' states at its end."""
        kv = self.engine.kv
        hit = kv.lookup(kv.hash_prompt(np.array(tokens, np.int32)), len(tokens))
        states = []
        for number, group in enumerate(self.engine.plan.ledger.groups):
            if isinstance(group.spec, MambaSpec) and hit.num_tokens:
                block_id = int(hit.block_ids[number][-1])
                states += [tensor[block_id] for layer in group.layer_ids for tensor in self.views.layers[layer]]
        return hit.num_tokens, states

    @property
    def num_accepted(self) -> int:
        """Drafts, of all rows."""
        counters = self.engine.instance.speculation.counters()
        return 0 if counters is None else counters.num_accepted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ground:
    """A family, and what it says and keeps without drafts."""

    path: Path
    plain: Run
    outputs: list[list[int]]

    @property
    def sequences(self) -> list[list[int]]:
        return [prompt + output for prompt, output in zip(PROMPTS, self.outputs, strict=True)]

    def drafting(self, marks: list[bool], *, block_size: int = 8) -> Run:
        options = dataclasses.replace(PLAIN, speculation=SPECULATION, block_size=block_size)
        return Run(self.path, options, KnownDrafts(self.sequences, marks))


@pytest.fixture(scope="module", params=FAMILIES)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    path = tiny_families.checkpoint(request.param, tmp_path_factory)
    plain = Run(path, PLAIN)
    return Ground(path=path, plain=plain, outputs=plain.answer(PROMPTS))


@pytest.mark.parametrize("marks", [RIGHT, PARTLY_RIGHT, WRONG], ids=["right", "partly_right", "wrong"])
def test_drafts_change_no_token_and_no_cached_state(ground: Ground, marks: list[bool]) -> None:
    mine = ground.drafting(marks)
    assert mine.answer(PROMPTS) == ground.outputs
    assert (mine.num_accepted > 0) == any(marks)
    for prompt, sequence in zip(PROMPTS, ground.sequences, strict=True):
        for border in range(len(prompt) // 8 * 8 + 8, len(sequence) - 1, 8):  # the last token is never computed
            num_tokens, states = mine.cached_states(sequence[: border + 1])
            expected_tokens, expected = ground.plain.cached_states(sequence[: border + 1])
            assert (num_tokens, expected_tokens) == (border, border)
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [8, 2], ids=["blocks_of_8", "blocks_shorter_than_drafts"])
def test_hits_on_borders_that_drafts_crossed_change_no_token(ground: Ground, block_size: int) -> None:
    mine = ground.drafting(PARTLY_RIGHT, block_size=block_size)
    assert mine.answer(PROMPTS) == ground.outputs
    for length in (9, 22):
        longer = [prompt + output[:length] for prompt, output in zip(PROMPTS, ground.outputs, strict=True)]
        answers = mine.answer(longer)
        assert [answer[: NUM_OUTPUT - length] for answer in answers] == [output[length:] for output in ground.outputs]
    assert mine.engine.kv.stats().num_hit_tokens > 0


def test_warming_up_writes_no_state_into_the_null_block(ground: Ground) -> None:
    mine = ground.drafting(RIGHT)
    mine.worker.warm_up()
    for layer, spec in enumerate(mine.engine.plan.model.layers):
        if isinstance(spec, MambaSpec):
            assert all(tensor[0].isnan().all() for tensor in mine.views.layers[layer])
