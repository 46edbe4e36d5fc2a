"""One request's way from a prefill instance to a decode instance: its states and what it holds. Data only.

                admitted on P            prompt computed,          D steps that write D's blocks
                blocks on D allocated    P's last chunk retired    otherwise have retired (fence)
    WAITING ----------------> RESERVED ----------------> FENCED ----------------> FERRYING
       ^                         |  |                      |  |                   |  |   |
       +-------------------------+  | abort,               |  | lease over,       |  |   | every rank DONE:
         preempted on P:            | ended on P           |  | P lost            |  |   | P's blocks go, D decodes
         D's blocks go back         v                      |  v                   |  |   +---> (delivered)
                                  (gone) <-----------------+ (failed) <-----------+  |
                                    ^          abort         in place   every rank   | abort, lease over, ranks
                                    |                                   reported,    | silent, P lost
                                    |                                   not all DONE v
                                    +---------------------------------------- QUIESCING
                               all ranks report no byte under way, or lease and one timeout are over

failed in place   no byte will land any more: the blocks of both sides go. Policy fail ends the request, policy
                  recompute lets it wait on D to be computed anew: D's blocks are those that come after the prompt,
                  which may lack what the prompt itself reads (windows, states)
QUIESCING         a byte may still land: no block of either side is given back. The request has left: it
                  ended, or (policy recompute) waits on D to be computed in other blocks

Owns nothing but the values; transfers.py moves them from state to state.
"""

from __future__ import annotations

import dataclasses
import enum

from blockferry.connectors.base import TransferPart
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.sequence import Sequence, Ticket


class HandoffState(enum.Enum):
    """See the module's drawing."""

    WAITING = "waiting"
    RESERVED = "reserved"
    FENCED = "fenced"
    FERRYING = "ferrying"
    QUIESCING = "quiescing"


class LoadFailurePolicy(enum.StrEnum):
    """What happens to a request whose blocks did not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


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
    first_token_id: int | None = None
    lease_ends_s: float = 0.0
    transfer_id: int | None = None
    parts: tuple[TransferPart, ...] = ()  # of the transfer, once there is one

    @property
    def num_blocks(self) -> int:
        """Blocks of the decode side that are ferried, of all groups."""
        return sum({part.dst_group: len(part.dst_block_ids) for part in self.parts}.values())

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

    def give_back(self) -> None:
        """Free rows and blocks of both sides; only when no byte may land any more."""
        self.source.drop(self.source_sequence)
        self.target.drop(self.target_sequence)

    def describe_failure(self, reason: str) -> str:
        """The failure, naming both peers."""
        source_id, target_id = self.source.instance_id, self.target.instance_id
        return f"the KV blocks of the prompt did not get from {source_id} to {target_id}: {reason}"
