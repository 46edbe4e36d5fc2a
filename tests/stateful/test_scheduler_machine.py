"""Random schedules of whole deployments: tokens are right, blocks come back, every request ends exactly once."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.scheduler_machine import MACHINE_SETTINGS, MOST_GROUPS, SchedulerMachine, small_shapes, suit_family
from support.sim_families import SPECS, largest_step
from support.simulator import Shape, SimCluster

from blockferry.connectors.base import Overlap, TransferMode, TransferState
from blockferry.engine.config import Role
from blockferry.engine.kv.spec import AttentionSpec
from blockferry.engine.scheduler.outputs import Route


class MixedMachine(SchedulerMachine):
    @initialize(
        shape=small_shapes,
        family=st.sampled_from(sorted(SPECS)),
        has_draft=st.sampled_from([False, False, True]),
        retention=st.sampled_from([None, None, 0, 1, 2]),
        pages=st.none() | st.lists(st.integers(1, 4), min_size=MOST_GROUPS, max_size=MOST_GROUPS),
    )
    def start(self, shape, family, has_draft, retention, pages):
        num_groups = len(SPECS[family](1))
        interval = None if retention is None else retention * largest_step(family, shape["block_size"])
        self.kind = {
            "family": family,
            "has_draft": has_draft,
            "retention_interval": interval,
            "pages_per_slab": None if pages is None else tuple(pages[:num_groups]),
            "block_size": shape["block_size"],
        }
        self.cluster = SimCluster(self.newcomer(shape, None), max_model_len=48)
        self.num_joined += 1

    def newcomer(self, shape, data):
        suit_family(shape, self.kind["family"])
        return Shape(instance_id=f"mixed-{self.num_joined}", **shape | self.kind)


def has_one_reach(family: str) -> bool:
    """Whether layers reach as far with blocks of any size, so that instances of several can hand sequences over."""
    reaches = [
        [spec.reach for spec in SPECS[family](block_size) if isinstance(spec, AttentionSpec)] for block_size in (2, 4)
    ]
    return reaches[0] == reaches[1]


class FerryingMachine(SchedulerMachine):
    """Hand-overs and what becomes of them; subclasses say of which caches."""

    def open(self, prefills, decodes, *, mode, policy, overlap):
        p_shapes = [Shape(instance_id=f"p{i}", role=Role.PREFILL, **shape) for i, shape in enumerate(prefills)]
        d_shapes = [Shape(instance_id=f"d{i}", role=Role.DECODE, **shape) for i, shape in enumerate(decodes)]
        if mode is TransferMode.PULL and overlap is Overlap.LAYERS:
            overlap = Overlap.CHUNKS
        self.cluster = SimCluster(
            *p_shapes, *d_shapes, max_model_len=48, mode=mode, load_failure_policy=policy, overlap=overlap
        )

    def newcomer(self, shape, data):
        role = data.draw(st.sampled_from([Role.PREFILL, Role.DECODE]))
        return Shape(instance_id=f"{role}-{self.num_joined}", role=role, **self.suit(shape, data))

    def suit(self, shape, data):
        """A shape that sequences may come from and go to."""
        return shape

    @precondition(lambda self: any(one.watched for one in self.cluster.transfers))
    @rule(data=st.data(), has_landed=st.booleans())
    def report_again(self, data, has_landed):
        watched = [number for number, one in enumerate(self.cluster.transfers) if one.watched]
        self.cluster.finish_watched(data.draw(st.sampled_from(watched)), has_landed=has_landed)

    @precondition(lambda self: self.cluster.strays)
    @rule()
    def land_strays(self):
        self.cluster.spoil_with_strays()

    @precondition(lambda self: any(one.ranks_left for one in self.cluster.transfers))
    @rule(
        data=st.data(),
        state=st.sampled_from([*TransferState, TransferState.DONE, TransferState.DONE]),
        is_lost=st.sampled_from([False, False, False, True]),
    )
    def report(self, data, state, is_lost):
        index = data.draw(st.sampled_from([i for i, one in enumerate(self.cluster.transfers) if one.ranks_left]))
        if state is TransferState.DONE and not self.cluster.can_finish(self.cluster.transfers[index]):
            return
        is_quiesced = state is not TransferState.FAILED or data.draw(st.booleans())
        is_watched = not is_quiesced and data.draw(st.booleans())
        self.cluster.finish_transfer(
            index, state, is_quiesced=is_quiesced, is_watched=is_watched, is_lost=is_lost and is_quiesced
        )

    @precondition(lambda self: any(one.is_moving for one in self.cluster.transfers))
    @rule(data=st.data())
    def land_some_bytes(self, data):
        self.cluster.spoil(data.draw(st.sampled_from([one for one in self.cluster.transfers if one.is_moving])))

    @precondition(lambda self: any(one.is_moving for one in self.cluster.transfers))
    @rule(data=st.data(), num_steps=st.integers(1, 6))
    def wake_late(self, data, num_steps):
        """A rank sleeps through all that limits its transfer, others use what is free, and it goes on where it was."""
        transfer = data.draw(st.sampled_from([one for one in self.cluster.transfers if one.is_moving]))
        target = transfer.command.dst_instance_id
        self.cluster.tick(40.0)
        self.cluster.tick(100.0)
        if target not in self.cluster.instances:
            return
        for family in range(3):
            self.add_one(family, 12, Route(prefill=target, decode=target), max_tokens=8)
        for step in range(2 * num_steps):
            if step == num_steps and transfer.is_moving:
                self.cluster.spoil(transfer)
            self.cluster.plan(target)
            self.cluster.execute(target)
            self.cluster.commit(target)

    @rule(data=st.data())
    def obey_cancels(self, data):
        self.cluster.obey_cancels()


class DisaggregatedMachine(FerryingMachine):
    @initialize(
        prefills=st.lists(small_shapes, min_size=1, max_size=2),
        decodes=st.lists(small_shapes, min_size=1, max_size=2),
        mode=st.sampled_from(list(TransferMode)),
        policy=st.sampled_from(["recompute", "fail"]),
        overlap=st.sampled_from(list(Overlap)),
    )
    def start(self, prefills, decodes, mode, policy, overlap):
        self.open(prefills, decodes, mode=mode, policy=policy, overlap=overlap)


class DisaggregatedHybridMachine(FerryingMachine):
    """The same with several cache groups on both sides."""

    @initialize(
        prefills=st.lists(small_shapes, min_size=1, max_size=2),
        decodes=st.lists(small_shapes, min_size=1, max_size=2),
        mode=st.sampled_from(list(TransferMode)),
        policy=st.sampled_from(["recompute", "fail"]),
        overlap=st.sampled_from(list(Overlap)),
        family=st.sampled_from(sorted(SPECS)),
        has_draft=st.sampled_from([False, False, True]),
        retention=st.sampled_from([None, None, 0, 1]),
        data=st.data(),
    )
    def start(self, prefills, decodes, mode, policy, overlap, family, has_draft, retention, data):
        self.family, self.has_draft, self.retention = family, has_draft, retention
        self.block_size = prefills[0]["block_size"]
        suited = [[self.suit(shape, data) for shape in shapes] for shapes in (prefills, decodes)]
        self.open(*suited, mode=mode, policy=policy, overlap=overlap)

    def suit(self, shape, data):
        num_groups = len(SPECS[self.family](1))
        if not has_one_reach(self.family):
            shape["block_size"] = self.block_size
        suit_family(shape, self.family)
        shape["family"], shape["has_draft"] = self.family, self.has_draft
        if self.retention is not None:
            shape["retention_interval"] = self.retention * largest_step(self.family, shape["block_size"])
        if data.draw(st.booleans()):
            pages = data.draw(st.lists(st.integers(1, 4), min_size=num_groups, max_size=num_groups))
            shape["pages_per_slab"] = tuple(pages)
        return shape


TestMixed = MixedMachine.TestCase
TestMixed.settings = MACHINE_SETTINGS
TestDisaggregated = DisaggregatedMachine.TestCase
TestDisaggregated.settings = MACHINE_SETTINGS
TestDisaggregatedHybrid = DisaggregatedHybridMachine.TestCase
TestDisaggregatedHybrid.settings = MACHINE_SETTINGS
