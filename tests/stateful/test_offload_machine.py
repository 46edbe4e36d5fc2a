"""Random schedules of instances with tiers: copies run and are reported at any time, fail, and come too late."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.scheduler_machine import MACHINE_SETTINGS, MOST_GROUPS, SchedulerMachine, small_shapes, suit_family
from support.sim_families import SPECS, can_cache, largest_step
from support.simulator import Shape, SimCluster, TierShapes

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.config import Role
from blockferry.engine.kv.tier_policies import PolicyName
from blockferry.engine.scheduler.handoff import LoadFailurePolicy
from blockferry.engine.scheduler.offload_stores import StoreWhen
from blockferry.engine.scheduler.offloading import OffloadOptions

tiers = st.builds(
    TierShapes,
    units_per_block=st.tuples(*[st.integers(1, 3)] * MOST_GROUPS),
    num_units=st.integers(6, 80),
    num_disk_units=st.sampled_from([0, 20, 100]),
    policy=st.sampled_from(PolicyName),
    options=st.builds(
        OffloadOptions,
        when=st.sampled_from(StoreWhen),
        min_load_tokens=st.sampled_from([1, 8]),
        policy=st.sampled_from(LoadFailurePolicy),
    ),
)


class OffloadMachine(SchedulerMachine):
    """Verbs of the tiers beside those of the scheduler; subclasses say which instances there are."""

    @rule(data=st.data(), index=st.integers(0, 5), fails=st.sampled_from([False, False, False, True]))
    def copy(self, data, index, fails):
        self.cluster.copy(data.draw(st.sampled_from(sorted(self.cluster.instances))), index, fails=fails)

    @rule(data=st.data(), index=st.integers(0, 5))
    def report_copy(self, data, index):
        self.cluster.report_copy(data.draw(st.sampled_from(sorted(self.cluster.instances))), index)

    @rule(seed=st.integers(0, 1 << 16), num_actions=st.integers(10, 60))
    def churn_with_copies(self, seed, num_actions):
        generator = np.random.default_rng(seed)
        cluster, instance_ids = self.cluster, sorted(self.cluster.instances)
        actions = [cluster.plan, cluster.execute, cluster.commit, cluster.copy, cluster.report_copy]
        pace = generator.dirichlet(np.ones(len(actions) * len(instance_ids)))
        for choice in generator.choice(len(pace), num_actions, p=pace).tolist():
            actions[choice % len(actions)](instance_ids[choice // len(actions)])
            finishable = [one for one in cluster.transfers if one.ranks_left and cluster.can_finish(one)]
            if finishable and generator.random() < 0.3:
                cluster.finish_transfer(cluster.transfers.index(finishable[generator.integers(len(finishable))]))
            cluster.check()

    @rule(num_tokens=st.integers(8, 40), families=st.permutations([0, 1, 2]))
    def return_one_by_one(self, num_tokens, families):
        """Conversations that push each other out of the pool, and come back."""
        for family in [*families, *families]:
            self.add_one(family, num_tokens, self.routes[0], max_tokens=2)
            for _ in range(12):
                self.cluster.step_all()


class MixedOffloadMachine(OffloadMachine):
    @initialize(
        shape=small_shapes,
        family=st.sampled_from(sorted(family for family in SPECS if can_cache(family))),
        has_draft=st.sampled_from([False, False, True]),
        retention=st.sampled_from([None, None, 0, 1, 2]),
        pages=st.none() | st.lists(st.integers(1, 4), min_size=MOST_GROUPS, max_size=MOST_GROUPS),
        tiers=tiers,
    )
    def start(self, shape, family, has_draft, retention, pages, tiers):
        self.kind = {
            "family": family,
            "has_draft": has_draft,
            "retention_interval": None if retention is None else retention * largest_step(family, shape["block_size"]),
            "pages_per_slab": None if pages is None else tuple(pages[: len(SPECS[family](1))]),
            "block_size": shape["block_size"],
            "enable_caching": True,
            "tiers": tiers,
        }
        self.cluster = SimCluster(self.newcomer(shape, None), max_model_len=48)
        self.num_joined += 1

    def newcomer(self, shape, data):
        suit_family(shape, self.kind["family"])
        return Shape(instance_id=f"mixed-{self.num_joined}", **shape | self.kind)

    @rule()
    @precondition(lambda self: self.cluster.failed == set())
    def look_at_status(self):
        self.cluster.central.status()


class FerriedOffloadMachine(OffloadMachine):
    """Prefill instances with tiers hand over to decode instances without."""

    @initialize(
        prefill=small_shapes,
        decode=small_shapes,
        mode=st.sampled_from(list(TransferMode)),
        overlap=st.sampled_from([Overlap.NONE, Overlap.CHUNKS]),
        family=st.sampled_from(sorted(family for family in SPECS if can_cache(family))),
        tiers=tiers,
    )
    def start(self, prefill, decode, mode, overlap, family, tiers):
        self.family, self.tiers, self.block_size = family, tiers, prefill["block_size"]
        prefill["enable_caching"] = True
        self.cluster = SimCluster(
            self.shape("p0", Role.PREFILL, prefill),
            self.shape("d0", Role.DECODE, decode),
            max_model_len=48,
            mode=mode,
            overlap=overlap,
        )

    def newcomer(self, shape, data):
        role = data.draw(st.sampled_from([Role.PREFILL, Role.DECODE]))
        return self.shape(f"{role}-{self.num_joined}", role, shape)

    def shape(self, instance_id, role, shape):
        suit_family(shape, self.family)
        shape["block_size"] = self.block_size
        tiers = self.tiers if role is Role.PREFILL and shape["enable_caching"] else None
        return Shape(instance_id=instance_id, role=role, family=self.family, tiers=tiers, **shape)


TestMixedOffload = MixedOffloadMachine.TestCase
TestMixedOffload.settings = MACHINE_SETTINGS
TestFerriedOffload = FerriedOffloadMachine.TestCase
TestFerriedOffload.settings = MACHINE_SETTINGS
