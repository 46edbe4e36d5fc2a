"""Which instances a deployment has at this moment, and what each may still do. Ends no request and frees no block.

                                     nothing is left there
    add --> SERVING --drain--> DRAINING -----------------> DRAINED --remove--> (forgotten)
               |                   |                          |
               +-------------------+----------- fail ---------+--> FAILED --remove, once nothing moves--> (forgotten)

SERVING    takes requests, as far as its ranks have connected
DRAINING   takes none; what is there goes on, until it has ended or the drain's time is over
DRAINED    holds nothing
FAILED     was given up, for good; its processes may still move bytes into blocks of others, until the last has ended

A deployment *wants* the instances that nobody has asked to drain or to be removed: a failed one too, until it is
replaced. Ids are never used twice, so that a late word of an old instance is never taken for one of a new.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping

from blockferry.engine.errors import RequestRejected
from blockferry.engine.request import Request
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.schedule import StepScheduler

FCFS = "fcfs"
POLICIES = (FCFS, "priority")


class MemberState(enum.StrEnum):
    """See the module's drawing."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    FAILED = "failed"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One instance of the deployment. Mutated by Membership only."""

    instance: Instance
    stepper: StepScheduler
    state: MemberState = MemberState.SERVING
    failure: str = ""  # why it was given up
    drain_s: float = 0.0  # how long what is there may go on, from when it was told to drain
    drain_ends_s: float = math.inf
    is_gone: bool = False  # failed, and none of its processes is left
    is_leaving: bool = False  # to be forgotten as soon as that is safe

    @property
    def instance_id(self) -> str:
        """Its name."""
        return self.instance.instance_id

    @property
    def is_wanted(self) -> bool:
        """Whether the deployment lacks something while it does not serve."""
        return not self.is_leaving and math.isinf(self.drain_ends_s)


class Membership:
    """The instances of a deployment, in the order in which they came. Called by CentralScheduler's thread."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._instances: dict[str, Instance] = {}
        self._used_ids: set[str] = set()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Every instance that is not forgotten."""
        return self._instances

    @property
    def failures(self) -> str:
        """Why instances that are wanted do not serve; empty when none has failed."""
        return "; ".join(f"instance {one.instance_id}: {one.failure}" for one in self if one.failure and one.is_wanted)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._members

    def find(self, instance_id: str) -> Member:
        """Raises ValueError for an instance that is unknown, or forgotten."""
        member = self._members.get(instance_id)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise ValueError(f"instance {instance_id!r} is unknown; there are: {known}")
        return member

    def serving(self, instance_id: str, request: Request) -> Instance:
        """An instance for a new request. Raises RequestRejected where it takes none, ValueError where it is unknown."""
        member = self.find(instance_id)
        if member.state is MemberState.SERVING:
            return member.instance
        why = f"has failed: {member.failure}" if member.state is MemberState.FAILED else f"is {member.state}"
        raise RequestRejected(request.request_id, f"instance {instance_id} {why}; retry elsewhere")

    def check_new(self, instance: Instance) -> None:
        """Raises ValueError for an instance that cannot come in."""
        policy = instance.config.policy
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; use one of {', '.join(POLICIES)}")
        if instance.instance_id in self._used_ids:
            raise ValueError(
                f"there is or was an instance {instance.instance_id!r}; use an id that this deployment never had"
            )

    def add(self, instance: Instance) -> None:
        """Take an instance in. check_new() was content with it."""
        self._used_ids.add(instance.instance_id)
        self._instances[instance.instance_id] = instance
        self._members[instance.instance_id] = Member(instance=instance, stepper=StepScheduler(instance))

    def drain(self, member: Member, *, drain_s: float, now_s: float) -> None:
        """Nothing new comes to it; told again, only its time changes. A failed one stays failed."""
        member.drain_s, member.drain_ends_s = drain_s, now_s + drain_s
        if member.state is MemberState.SERVING:
            member.state = MemberState.DRAINING

    def mark_drained(self, member: Member) -> None:
        """Nothing is left on a draining instance."""
        assert member.state is MemberState.DRAINING, (member.instance_id, member.state)
        member.state = MemberState.DRAINED

    def fail(self, member: Member, reason: str) -> None:
        """It is given up."""
        assert member.state is not MemberState.FAILED, member.instance_id
        member.state, member.failure = MemberState.FAILED, reason

    def ask_to_leave(self, member: Member) -> None:
        """To be forgotten once that is safe. Raises ValueError while it is neither drained nor failed."""
        if member.state not in (MemberState.DRAINED, MemberState.FAILED):
            raise ValueError(
                f"instance {member.instance_id} is {member.state}; only one that is drained or failed can be removed: "
                "drain it and wait until it is drained"
            )
        member.is_leaving = True

    def forget(self, member: Member) -> None:
        """It is a member no more."""
        assert member.is_leaving, (member.instance_id, member.state)
        del self._members[member.instance_id], self._instances[member.instance_id]
