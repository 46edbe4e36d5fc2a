"""Tells transfers which layers of a step this rank has computed. The worker's model thread calls it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from blockferry.connectors.compute_progress import ComputeProgress


class LayerReports:
    """From layers as models number them to caches as plans number them."""

    def __init__(self, progress: ComputeProgress, layer_numbers: Sequence[int]) -> None:
        """`layer_numbers`: by layer id of the plan, the number of the model's layer, which may have two caches."""
        self._progress = progress
        self._step_id = -1
        self._last_id = {number: layer_id for layer_id, number in enumerate(layer_numbers)}
        is_sorted = all(one <= other for one, other in itertools.pairwise(layer_numbers))
        if not is_sorted:  # ids of an encoder-decoder's caches: only the end of a step says what is done
            self._last_id = {}

    def begin(self, step_id: int) -> None:
        """A step's layers come next."""
        self._step_id = step_id

    def layer_done(self, number: int) -> None:
        """A layer has written the step to its caches."""
        layer_id = self._last_id.get(number)
        if layer_id is not None:
            self._progress.reach(self._step_id, layer_id)

    def end(self) -> None:
        """The whole step is computed."""
        self._progress.reach(self._step_id)
