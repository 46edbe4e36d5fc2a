"""What keeps a deployment whole: pure decisions on what is seen of it, with no clock, no Ray and no waiting.

seen (wanted counts, phases, the scheduler's word, what has ended)  ->  decide()  ->  Actions

phase of an instance, as its supervisor knows it:

COMING ---the scheduler says that it serves---> SERVING --drain--> VACATING (its place is kept) or SURPLUS (it is not)
   |                                               | failed                  |
   +------- failed ------> LOST <------------------+-------------------------+----> (processes gone, place given back)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from blockferry.engine.config import InstanceConfig, Role
from blockferry.engine.errors import BlockferryError

HELD_S = 60.0  # what has been up for so long is sound: the next failure is a first one
MAX_FAILURES = 5  # of scheduler or HTTP server in a row, then a deployment is given up
MAX_DELAY_S = 60.0


class ScaleRefused(BlockferryError):
    """A change of a deployment that cannot be; nothing was changed."""


class Phase(enum.Enum):
    """Where an instance is in its life."""

    COMING = "coming"
    SERVING = "serving"
    VACATING = "vacating"  # leaves, and another one is to come into its place
    SURPLUS = "surplus"  # leaves
    LOST = "lost"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One instance at this moment."""

    instance_id: str
    index: int  # in the deployment's `instances`
    phase: Phase
    state: str | None  # the scheduler's word; None: it does not list it, or has not been asked


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What to do now about instances."""

    clear: tuple[str, ...] = ()  # failed instances whose remains are to be taken away
    start: tuple[int, ...] = ()  # indexes in `instances` of which one more is to come, each as often as it is named


def decide(
    seen: Sequence[Seen], wanted: Mapping[int, int], *, not_before_s: Mapping[int, float], now_s: float
) -> Actions:
    """What to do about instances while the scheduler is there.

    Args:
        seen: every instance that holds a place, whatever its phase.
        wanted: how many are to serve, by index in the deployment's `instances`.
        not_before_s: when the next attempt at an index is due, for those that failed.
        now_s: on the clock of not_before_s.
    """
    # others are watched by whoever brings them up or lets them go
    clear = tuple(one.instance_id for one in seen if one.state == "failed" and one.phase is Phase.SERVING)
    start: list[int] = []
    for index, count in wanted.items():
        # a failed one counts until its place is free: its successor needs that place
        num_held = sum(one.index == index and one.phase is not Phase.SURPLUS for one in seen)
        if now_s >= not_before_s.get(index, now_s):
            start += [index] * max(0, count - num_held)
    return Actions(clear=clear, start=tuple(start))


class Streak:
    """Failures in a row of one thing, which ends once it has been up for HELD_S. Told the time by its owner."""

    def __init__(self, *, now_s: float) -> None:
        self.num_failures = 0
        self._up_s: float | None = now_s

    def up(self, *, now_s: float) -> None:
        """It works again."""
        self._up_s = now_s

    def fail(self, *, now_s: float) -> float:
        """It has failed; returns for how many seconds to wait before the next attempt, 0 after a first failure."""
        if self._up_s is not None and now_s - self._up_s >= HELD_S:
            self.num_failures = 0
        self._up_s = None
        self.num_failures += 1
        return 0.0 if self.num_failures == 1 else min(MAX_DELAY_S, 2.0 ** (self.num_failures - 2))


def spread(counts: Mapping[str, int], wanted: Mapping[int, int], instances: Sequence[InstanceConfig]) -> dict[int, int]:
    """Wanted counts by index in `instances`, given new ones by role. Raises ScaleRefused.

    Where a role has several entries, more come to the first of them and fewer are taken from the last.
    """
    target = dict(wanted)
    roles = {str(instance.role) for instance in instances}
    for role, count in counts.items():
        if role not in roles:
            raise ScaleRefused(f"no instance has the role {role!r}; this deployment has {', '.join(sorted(roles))}")
        if count < 0:
            raise ScaleRefused(f"{role}={count} is negative; use 0 or more")
        of_role = [index for index, instance in enumerate(instances) if instance.role == role]
        change = count - sum(target[index] for index in of_role)
        target[of_role[0]] += max(0, change)
        for index in reversed(of_role):
            taken = min(target[index], max(0, -change))
            target[index] -= taken
            change += taken
    _check_can_serve(target, instances)
    return target


def _check_can_serve(target: Mapping[int, int], instances: Sequence[InstanceConfig]) -> None:
    num_of = {role: sum(target[i] for i, one in enumerate(instances) if one.role is role) for role in Role}
    if not num_of[Role.MIXED] and not (num_of[Role.PREFILL] and num_of[Role.DECODE]):
        words = ", ".join(f"{role}={count}" for role, count in num_of.items())
        raise ScaleRefused(
            f"nothing could be served with {words}; keep one mixed instance, or one of prefill and one of decode"
        )
