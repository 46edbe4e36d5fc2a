"""Verbs of a simulated deployment in any order: what the scheduler's state machines have in common."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.sim_drafts import SimDrafts
from support.sim_families import SPECS, can_cache, num_state_groups
from support.simulator import VOCAB_SIZE, Shape, SimCluster

from blockferry.engine.config import Role
from blockferry.engine.errors import RequestRejected
from blockferry.engine.scheduler.outputs import Route

MACHINE_SETTINGS = settings(
    max_examples=int(os.environ.get("BLOCKFERRY_MACHINE_EXAMPLES", "40")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="BLOCKFERRY_MACHINE_EXAMPLES" not in os.environ,
)

MOST_INSTANCES = 6
sometimes = st.sampled_from([False, False, False, True])

MOST_GROUPS = max(len(make_specs(1)) for make_specs in SPECS.values())

some_drafts = st.builds(
    SimDrafts,
    num_tokens=st.integers(1, 4),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    willingness=st.sampled_from([1.0, 0.8]),
    is_adaptive=st.booleans(),
)

small_shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 24),
        "block_size": st.sampled_from([2, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 24),
        "num_steps_in_flight": st.integers(1, 2),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "enable_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
        "num_ranks": st.integers(1, 2),
        "max_queue_len": st.sampled_from([3, 100]),
        "drafts": st.none() | some_drafts,
    }
)


def suit_family(shape, family: str) -> None:
    """Make a drawn shape one that a family's caches allow."""
    shape["num_blocks"] = 1 + (shape["num_blocks"] - 1) * len(SPECS[family](1))
    shape["enable_caching"] &= can_cache(family)
    if shape["drafts"] is not None:  # each takes a state of its own
        shape["num_blocks"] += 2 * shape["drafts"].num_tokens * num_state_groups(family)


class SchedulerMachine(RuleBasedStateMachine):
    """Verbs of a deployment in any order; subclasses say which instances there are."""

    cluster: SimCluster

    def __init__(self):
        super().__init__()
        self.next_handle = 0
        self.rejected: set[int] = set()
        self.resumed: set[int] = set()
        self.num_joined = 0

    @property
    def routes(self) -> list[Route]:
        """Every way through the instances that serve: hand-overs first, then those that stay where they are."""
        serving = [self.cluster.instances[instance_id] for instance_id in self.serving()]
        pairs = [
            (source.instance_id, target.instance_id)
            for source in serving
            for target in serving
            if (source.role, target.role) == (Role.PREFILL, Role.DECODE)
        ]
        pairs += [(one.instance_id, one.instance_id) for one in serving]
        return [Route(prefill=prefill, decode=decode) for prefill, decode in pairs]

    # instances

    def newcomer(self, shape, data) -> Shape:
        """An instance of that shape as the others allow it."""
        raise NotImplementedError

    @precondition(lambda self: len(self.cluster.instances) < MOST_INSTANCES)
    @rule(data=st.data(), shape=small_shapes, is_wanted=sometimes)
    def join(self, data, shape, is_wanted):
        if is_wanted:
            self.cluster.add_instance(self.newcomer(shape, data))
            self.num_joined += 1

    @rule(data=st.data(), deadline_s=st.sampled_from([0.0, 5.0, 1000.0]), is_wanted=sometimes)
    def drain(self, data, deadline_s, is_wanted):
        if is_wanted:
            instance_id = data.draw(st.sampled_from(sorted(self.cluster.instances)))
            if len(self.serving()) > 1 or instance_id not in self.serving():
                self.cluster.central.drain(instance_id, deadline_s)

    @precondition(lambda self: len(self.serving()) < len(self.cluster.instances))
    @rule(data=st.data())
    def remove(self, data):
        instance_id = data.draw(st.sampled_from(sorted(self.cluster.instances)))
        state = self.cluster.state(instance_id)
        if state != "serving":
            with pytest.raises(RequestRejected, match="retry elsewhere"):
                self.cluster.add(self.next_handle, [1], Route(prefill=instance_id, decode=instance_id))
        if state in ("drained", "failed"):
            self.cluster.remove_instance(instance_id)
        else:
            with pytest.raises(ValueError, match="only one that is drained or failed"):
                self.cluster.remove_instance(instance_id)

    @precondition(lambda self: len(self.serving()) > 1)
    @rule(data=st.data(), is_wanted=sometimes)
    def lose_an_instance(self, data, is_wanted):
        if is_wanted:
            alive = sorted(set(self.cluster.instances) - self.cluster.failed)
            self.cluster.fail(data.draw(st.sampled_from(alive)))

    @precondition(lambda self: self.cluster.dying)
    @rule()
    def end_processes(self):
        self.cluster.end_processes(sorted(self.cluster.dying)[0])

    def serving(self) -> list[str]:
        return [instance_id for instance_id in self.cluster.instances if self.cluster.state(instance_id) == "serving"]

    # requests

    @rule(
        data=st.data(),
        num_prompt_tokens=st.integers(0, 40),
        max_tokens=st.integers(0, 20),
        family=st.integers(0, 2),
        priority=st.integers(0, 2),
        stop_token_ids=st.sampled_from([(), (3,), (1, 5, 9)]),
        min_tokens=st.integers(0, 4),
        num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
        num_given=st.sampled_from([0, 0, 0, 1, 4, 12]),
    )
    def add(
        self,
        data,
        num_prompt_tokens,
        max_tokens,
        family,
        priority,
        stop_token_ids,
        min_tokens,
        num_prompt_logprobs,
        num_given,
    ):
        self.add_one(
            family,
            num_prompt_tokens,
            data.draw(st.sampled_from(self.routes)),
            priority=priority,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            num_prompt_logprobs=num_prompt_logprobs,
            num_given=num_given,
        )

    def add_one(self, family, num_prompt_tokens, route, *, num_given=0, **options):
        """A request that comes with up to num_given tokens of its output: it was cut there, and is resumed."""
        # prompts of a family share prefixes
        prompt = np.random.default_rng(family).integers(0, VOCAB_SIZE, 40)[:num_prompt_tokens]
        handle = self.next_handle
        self.next_handle += 1
        given = self.cluster.drawn(prompt, **options)[:num_given] if num_prompt_tokens else []
        try:
            self.cluster.add(handle, prompt, route, given=given, **options)
        except RequestRejected:
            self.rejected.add(handle)

    @precondition(lambda self: self.resumable())
    @rule(data=st.data())
    def resume(self, data):
        handle = data.draw(st.sampled_from(self.resumable()))
        try:
            self.cluster.resume(handle, data.draw(st.sampled_from(self.routes)), as_handle=self.next_handle)
        except RequestRejected:
            return
        self.resumed.add(handle)
        self.next_handle += 1

    def resumable(self) -> list[int]:
        """Requests that may be sent again, and were not."""
        ended = self.cluster.finished.items()
        return [handle for handle, end in ended if end.is_resumable and handle not in self.resumed]

    @precondition(lambda self: self.cluster.central.num_unfinished)
    @rule(data=st.data())
    def abort(self, data):
        unfinished = sorted(set(self.cluster.requests) - set(self.cluster.finished))
        self.cluster.abort(data.draw(st.sampled_from(unfinished)))

    def abort_one(self, handle):
        if handle in set(self.cluster.requests) - set(self.cluster.finished):
            self.cluster.abort(handle)

    # steps, out of phase

    @rule(data=st.data())
    def plan(self, data):
        self.cluster.plan(data.draw(st.sampled_from(sorted(self.cluster.instances))))

    @rule(data=st.data())
    def execute(self, data):
        self.cluster.execute(data.draw(st.sampled_from(sorted(self.cluster.instances))))

    @rule(data=st.data())
    def commit(self, data):
        self.cluster.commit(data.draw(st.sampled_from(sorted(self.cluster.instances))))

    @rule(seed=st.integers(0, 1 << 16), num_actions=st.integers(1, 40))
    def churn(self, seed, num_actions):
        # each instance has a pace of its own, so that some workers lag behind
        generator = np.random.default_rng(seed)
        cluster, instance_ids = self.cluster, sorted(self.cluster.instances)
        actions = [cluster.plan, cluster.execute, cluster.commit]
        pace = generator.dirichlet(np.append(np.ones(3 * len(instance_ids) + 1), 0.2))
        for choice in generator.choice(len(pace), num_actions, p=pace).tolist():
            if choice < 3 * len(instance_ids):
                actions[choice % 3](instance_ids[choice // 3])
            elif choice == len(pace) - 1:
                self.abort_one(int(generator.integers(self.next_handle + 1)))
            elif finishable := [one for one in cluster.transfers if one.ranks_left and cluster.can_finish(one)]:
                cluster.finish_transfer(cluster.transfers.index(finishable[generator.integers(len(finishable))]))
            cluster.check()

    @rule(num_requests=st.integers(2, 6), num_prompt_tokens=st.integers(1, 24), data=st.data())
    def add_burst(self, num_requests, num_prompt_tokens, data):
        """Requests of one prefix, which meet in the caches of both sides."""
        route = data.draw(st.sampled_from(self.routes[:4]))
        for index in range(num_requests):
            self.add_one(0, num_prompt_tokens + index % 3, route, max_tokens=2 + 3 * index, stop_token_ids=(2, 4, 6))

    @rule(seconds=st.sampled_from([0.1, 5.0, 20.0, 40.0, 100.0]))
    def let_time_pass(self, seconds):
        self.cluster.tick(seconds)

    @invariant()
    def books_agree(self):
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self):
        if hasattr(self, "cluster"):
            self.cluster.drain()
            self.cluster.check_all_free()
            for instance_id in list(self.cluster.instances):
                self.cluster.central.drain(instance_id, 0.0)
                self.cluster.tick()
                self.cluster.remove_instance(instance_id)
            assert not self.cluster.instances
