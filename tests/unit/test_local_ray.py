"""What the Ray cluster of one machine counts."""

from __future__ import annotations

import pytest

from blockferry.cluster.ray_session import local_cpus


@pytest.mark.parametrize(
    ("wanted", "num_cores", "counted"),
    [(0.0, 2, 2), (0.8, 2, 3), (2.0, 2, 4), (2.0, 16, 18), (6.5, 2, 14)],
)
def test_there_is_room_for_as_many_instances_again(wanted: float, num_cores: int, counted: int) -> None:
    assert local_cpus(wanted, num_cores=num_cores) == counted
    assert counted >= 2 * wanted
