"""One request's way from a prefill instance to a decode instance: its states and what it holds. Data only.

                admitted on P                prompt computed,
                blocks on D allocated        first token known              nothing is left to travel
    WAITING ----------------> RESERVED ----------------------> FERRYING -----------------------------> (delivered)
       ^                         |  |                           |    |                          P's blocks go, D decodes
       |  preempted on P         |  | abort,                    |    |
       +-------------------------+  | ended on P                |    | a transfer failed, abort, lease over, ranks
         D's blocks go back,        |                           |    | silent, P lost
         or quiesce, as below       v                           v    v
                                    (nothing under way: the blocks of both sides go)
                                    (else: P's blocks go at once, D's are held)
                                                   |
                                                   v
                                               QUIESCING -- no byte can land any more --> (gone)

Transfers begin once the fence has passed: the D steps that may still write D's blocks have retired. With overlap they
begin in RESERVED, piece by piece as P computes; without, in FERRYING. Any number may be under way.

A transfer that fails while P still computes stops all others; what then happens is decided when the prompt is
computed. Policy fail ends the request, policy recompute lets it wait on D to be computed anew, in other blocks: D's
blocks are those that come after the prompt, which may lack what the prompt itself reads (windows, states).

QUIESCING         a byte may still land in D's blocks, so they are held. The request has left: it ended, or waits on D,
                  or waits on P for another try. P's blocks were given back: whatever is read of them now, nobody uses.
                  No byte can land any more when every rank has said so of every transfer; where one cannot say, as its
                  connection failed or its process is gone, hold_s after that. Time alone frees nothing while the
                  instance that moves the bytes lives: it may be frozen, and go on where it was. It answers, or it is
                  given up and its processes are ended

Owns nothing but the values; transfers.py moves them from state to state.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import NamedTuple

from blockferry.connectors.base import Overlap, TransferPart
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.sequence import Sequence, Ticket
from blockferry.engine.scheduler.speculation import NO_DRAFTS


class HandoffState(enum.Enum):
    """See the module's drawing."""

    WAITING = "waiting"
    RESERVED = "reserved"
    FERRYING = "ferrying"
    QUIESCING = "quiescing"


class LoadFailurePolicy(enum.StrEnum):
    """What happens to a request whose blocks did not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """How a deployment hands sequences over."""

    overlap: Overlap = Overlap.NONE
    lease_s: float = 60.0  # from the computed prompt, or the last piece sent: then its blocks are no longer waited for
    transfer_timeout_s: float = 30.0
    # how long bytes of a failed connection or an ended process may be on their way; a frozen D is given up sooner
    hold_s: float = 90.0
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE


class ComputedTo(NamedTuple):
    """A step of the prefill instance and how many tokens of the prompt are computed after it."""

    step_id: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed:
    """A request that ends because its blocks did not arrive."""

    ticket: Ticket
    message: str


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Handoff:
    """The two sides of one hand-over. Owned and mutated by transfers.Handoffs."""

    ticket: Ticket
    source: Instance
    source_sequence: Sequence
    target: Instance
    target_sequence: Sequence
    state: HandoffState = HandoffState.WAITING
    fence_step: int = -1  # D steps up to here must have retired before bytes may land, see Instance.reserve
    planned: collections.deque[ComputedTo] = dataclasses.field(default_factory=collections.deque)
    num_sent: int = 0  # tokens of the prompt that have travelled, are under way or need not travel
    under_way: dict[int, tuple[TransferPart, ...]] = dataclasses.field(default_factory=dict)  # by transfer_id
    failure: str = ""  # why not all of it will arrive; nothing more is sent
    late: dict[int, float] = dataclasses.field(default_factory=dict)  # ended, not quiesced: when D's blocks are safe
    first_token_id: int | None = None
    draft_token_ids: Int32Array = dataclasses.field(
        default_factory=lambda: NO_DRAFTS
    )  # that P's last step proposed to follow it
    ready_s: float = 0.0  # when the prompt was computed
    lease_ends_s: float = 0.0
    num_blocks: int = 0  # of the decode side that were sent to, of all groups
    weight: float = 0.0  # of what was sent, see ferried.part_bytes
    num_bytes: int = 0  # that have arrived

    @property
    def is_passable(self) -> bool:
        """Whether bytes may land in D's blocks."""
        return self.target.retired_step >= self.fence_step

    @property
    def is_complete(self) -> bool:
        """Whether all of the prompt has arrived."""
        return self.num_sent >= self.ticket.num_given_tokens and not self.under_way and not self.failure

    @property
    def source_row(self) -> int:
        """The row that holds the prompt's blocks on P."""
        assert self.source_sequence.row is not None, self.state
        return self.source_sequence.row

    @property
    def target_row(self) -> int:
        """The row that holds the reserved blocks on D."""
        assert self.target_sequence.row is not None, self.state
        return self.target_sequence.row

    def renewed(self) -> Handoff:
        """The same hand-over before anything was reserved for it."""
        return Handoff(
            ticket=self.ticket,
            source=self.source,
            source_sequence=self.source_sequence,
            target=self.target,
            target_sequence=dataclasses.replace(self.target_sequence, row=None, num_hit_tokens=0),
        )

    def describe_failure(self, reason: str) -> str:
        """The failure, naming both peers."""
        source_id, target_id = self.source.instance_id, self.target.instance_id
        return f"the KV blocks of the prompt did not get from {source_id} to {target_id}: {reason}"
