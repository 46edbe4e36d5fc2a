"""A ledger of slabs through any history that a scheduler could write, with any mix of cache types; audited always."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.slab_serving import (
    CHUNK,
    MAX_MODEL_LEN,
    Admission,
    Serving,
    full,
    geometry,
    ints,
    latent,
    slab_config,
    states,
    window,
)

from blockferry.engine.kv.slab_queue import UNOWNED
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheSpec

block_sizes = st.sampled_from([2, 4, 8])
specs = st.one_of(
    st.builds(full, block_sizes),
    st.builds(latent, block_sizes),
    st.builds(window, block_sizes, st.integers(1, 20)),
    st.builds(states, block_sizes),
)


@st.composite
def configs(draw: st.DrawFn) -> KVCacheConfig:
    groups: list[KVCacheSpec] = draw(st.lists(specs, min_size=2, max_size=4))
    pages = tuple(draw(st.integers(1, 6)) for _ in groups)
    tail_group = draw(st.integers(0, len(groups) - 1))
    tail_pages = draw(st.integers(0, pages[tail_group] - 1))
    num_slabs = draw(st.integers(len(groups), 24))
    return slab_config(groups, geometry(pages, num_slabs, tail_group=tail_group, tail_pages=tail_pages))


prompts = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 8)).map(
    # few distinct beginnings, so that prefixes are shared
    lambda drawn: [drawn[0]] * drawn[1] + [7] * drawn[2]
)


class SlabMachine(RuleBasedStateMachine):
    @initialize(config=configs(), watermark=st.sampled_from([0.0, 0.2]), num_lookahead=st.sampled_from([0, 0, 1, 5]))
    def start(self, config: KVCacheConfig, watermark: float, num_lookahead: int) -> None:
        self.config = config
        self.serving = Serving(config, watermark=watermark, num_lookahead=num_lookahead)

    @precondition(lambda self: self.serving.free_rows())
    @rule(tokens=prompts)
    def admit_plainly(self, tokens: list[int]) -> None:
        self.serving.admit(Admission(tokens=tokens))

    @precondition(lambda self: self.serving.free_rows())
    @rule(
        admission=st.builds(
            Admission,
            tokens=prompts,
            chunk=st.integers(0, CHUNK),
            num_external_blocks=st.integers(0, 3),
            delay=st.booleans(),
            must_fit=st.booleans(),
            num_reserved=st.sampled_from([0, 0, 3]),
            watermark=st.booleans(),
        )
    )
    def admit_in_some_way(self, admission: Admission) -> None:
        self.serving.admit(admission)

    @precondition(lambda self: self.serving.loading())
    @rule(data=st.data(), arrived=st.booleans())
    def end_load(self, data: st.DataObject, arrived: bool) -> None:
        self.serving.end_load(data.draw(st.sampled_from(self.serving.loading())), arrived=arrived)

    @precondition(lambda self: self.serving.prefilling())
    @rule(data=st.data(), chunk=st.integers(1, CHUNK))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        self.serving.prefill(data.draw(st.sampled_from(self.serving.prefilling())), chunk)

    @precondition(lambda self: self.serving.decoding())
    @rule(data=st.data(), token=st.integers(0, 2), num_steps=st.integers(1, 6))
    def decode(self, data: st.DataObject, token: int, num_steps: int) -> None:
        for _ in range(num_steps):
            rows = self.serving.decoding()
            if not rows:
                return
            chosen = data.draw(st.just(rows) | st.lists(st.sampled_from(rows), unique=True, min_size=1))
            self.serving.decode(chosen, token)

    @precondition(lambda self: self.serving.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.serving.free(data.draw(st.sampled_from(sorted(self.serving.running))))

    @precondition(lambda self: self.serving.running)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        self.serving.pop(data.draw(st.sampled_from(sorted(self.serving.running))))

    @precondition(lambda self: self.serving.popped)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.serving.release(data.draw(st.integers(0, len(self.serving.popped) - 1)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.config.groups) - 1))
        num_pages = self.serving.pools.pools[group].num_blocks - 1
        pages = data.draw(st.lists(st.integers(1, num_pages), unique=True, max_size=4))
        self.serving.kv.evict_blocks(ints(pages), group)

    @rule()
    def reset(self) -> None:
        is_held = any(pool.ref_cnt.any() for pool in self.serving.pools.pools)
        assert self.serving.reset() == (not is_held)

    @invariant()
    def books_agree(self) -> None:
        self.serving.kv.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "serving"):
            return
        self.serving.finish()
        self.serving.kv.check_integrity()
        assert self.serving.kv.num_free_blocks == self.serving.kv.num_usable_blocks
        self.serve_the_longest()
        self.serving.finish()
        assert self.serving.reset()
        self.serving.kv.check_integrity()
        slabs = self.serving.pools._table
        assert (slabs.owner[: slabs.num_slabs + 1] == UNOWNED).all()

    def serve_the_longest(self) -> None:
        """A sequence as long as the ledger says it can be gets there alone; preempted once if its hit is scattered."""
        serving = self.serving
        longest = min(serving.kv.room.max_tokens_that_fit, MAX_MODEL_LEN) - serving.num_lookahead - 1
        if longest < 2:
            return
        tokens = ([0] * 40 + [7] * 8)[: longest // 2]
        for _ in range(2):
            admission = Admission(tokens=tokens, must_fit=True)
            # every refusal drops a hit, so that each attempt has a shorter one
            assert any(serving.admit(admission) for _ in range(len(tokens)))
            if self.goes_on_until(longest - 1):
                return
            tokens = serving.running[0].tokens
            serving.free(0)
            serving.kv.check_integrity()
        raise AssertionError((longest, len(tokens)))

    def goes_on_until(self, num_tokens: int) -> bool:
        serving = self.serving
        while serving.prefilling():
            if not serving.prefill(0, CHUNK):
                return False
        while serving.decoding() and serving.computed(0) < num_tokens:
            if not serving.decode([0], 1):
                return False
        return True


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
