"""Fields of a recurrent state: the rows of its tensors, as tensor-parallel ranks share them.

    a rank's convolution of Mamba-2, [rows, taps - 1]     | x of its heads | b of its groups | c of its groups |
    a unit of the field x                                 | all rows of one head |

Units are counted over all ranks, so unit 3 is the same part of the model however many there are: ranks of two instances
exchange the units that both hold. Fewer units than ranks are copied, as the groups of Mamba-2 are. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses

from blockferry.engine.models.sharding import Span


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateField:
    """Rows of a state tensor's first axis that mean one thing, in units that are never split between ranks.

    num_units is a multiple of the ranks or divides them: models refuse to be shared otherwise.
    """

    name: str
    num_units: int  # of all ranks
    rows_per_unit: int

    def held(self, tp_rank: int, tp_size: int) -> Span:
        """Units of one of tp_size ranks, at least one."""
        start = tp_rank * self.num_units // tp_size
        return Span(start=start, stop=max(start + 1, (tp_rank + 1) * self.num_units // tp_size))

    def num_copies(self, tp_size: int) -> int:
        """Ranks that hold the same units; they are neighbours."""
        return max(1, tp_size // self.num_units)

    def num_rows(self, tp_size: int) -> int:
        """Rows on each of tp_size ranks."""
        return len(self.held(0, tp_size)) * self.rows_per_unit
