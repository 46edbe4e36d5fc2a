"""How many tokens were drafted and how many of them accepted, in the words that `status` and `bench serve` share.

Values and arithmetic only; the scheduler counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# names in /metrics, which are vLLM's, without their prefixes
DRAFTS, DRAFTED, ACCEPTED = (f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Counts since some start."""

    num_drafts: int  # how often the drafts of a request were verified: once a step, however many they were
    num_drafted: int  # tokens
    num_accepted: int  # tokens

    @property
    def acceptance(self) -> float:
        """Accepted share of what was drafted; 0 where nothing was."""
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """Mean of a request's steps that verified drafts: those accepted, and the one that the model adds."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)

    def since(self, earlier: DraftCounts) -> DraftCounts | None:
        """What was counted in between; None where a counter began anew."""
        drafts = self.num_drafts - earlier.num_drafts
        drafted, accepted = self.num_drafted - earlier.num_drafted, self.num_accepted - earlier.num_accepted
        if min(drafts, drafted, accepted) < 0:
            return None
        return DraftCounts(num_drafts=drafts, num_drafted=drafted, num_accepted=accepted)


def draft_words(counts: Mapping[str, Any]) -> str:
    """One line about an instance's counts in JSON."""
    drafted, accepted = counts["drafted_per_position"], counts["accepted_per_position"]
    sums = DraftCounts(num_drafts=drafted[0], num_drafted=sum(drafted), num_accepted=sum(accepted))
    if not sums.num_drafted:
        return "speculation: nothing was drafted yet"
    positions = ", ".join(f"{kept / made:.0%}" for made, kept in zip(drafted, accepted, strict=True) if made)
    return (
        f"speculation: {sums.num_accepted:,} of {sums.num_drafted:,} drafted tokens accepted ({sums.acceptance:.1%}; "
        f"by position {positions}), {sums.tokens_per_step:.2f} tokens per step with drafts"
    )
