"""The worker half of the offload connector: bytes, fences, order, failures, and what survives a killed process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.offload_rank import LAYOUT, OffloadRank, block_of, part_of

from blockferry.connectors.base import ConnectorError
from blockferry.connectors.offload_base import CopyKind, CopyPart, OffloadError
from blockferry.connectors.offload_files import FileOwner, open_tier_file, remove_leftovers, remove_unused

MAIN = Path(__file__).parents[1] / "support" / "offload_rank.py"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[OffloadRank]:
    rank = OffloadRank(tmp_path)
    yield rank
    rank.close()


def test_stored_blocks_are_loaded_into_other_blocks(rank: OffloadRank) -> None:
    before = rank.pool.copy()
    assert rank.run(CopyKind.STORE, part_of([1, 2, 3])).is_done
    assert (rank.pool == before).all()
    event = rank.run(CopyKind.LOAD, part_of([11, 12, 13]))
    assert event.num_bytes == 3 * LAYOUT.num_bytes // LAYOUT.num_blocks
    for source, target in ((1, 11), (2, 12), (3, 13)):
        assert (block_of(rank.pool, target) == block_of(before, source)).all()
    others = [block for block in range(LAYOUT.num_blocks) if block not in (11, 12, 13)]
    assert all((block_of(rank.pool, block) == block_of(before, block)).all() for block in others)


def test_demoted_blocks_are_fetched_from_disk(rank: OffloadRank) -> None:
    before = rank.pool.copy()
    for kind, block_ids in ((CopyKind.STORE, [1, 2]), (CopyKind.DEMOTE, [1, 2])):
        assert rank.run(kind, part_of(block_ids)).is_done
    rank.run(CopyKind.STORE, part_of([5, 6]))  # memory holds something else now
    assert rank.run(CopyKind.FETCH, part_of([11, 12])).is_done
    for source, target in ((1, 11), (2, 12)):
        assert (block_of(rank.pool, target) == block_of(before, source)).all()


def test_the_pool_is_read_only_after_the_step_that_writes_it(rank: OffloadRank) -> None:
    rank.begin(CopyKind.STORE, [part_of([1])], after_step=3)
    rank.worker.executed(2)
    block_of(rank.pool, 1)[:] = 7
    assert rank.events.empty()
    rank.worker.executed(3)
    assert rank.events.get(timeout=10.0).is_done
    rank.run(CopyKind.LOAD, part_of([9]))
    assert (block_of(rank.pool, 9) == 7).all()


def test_a_step_waits_for_the_store_of_blocks_that_it_writes(rank: OffloadRank) -> None:
    job_id = rank.begin(CopyKind.STORE, [part_of([1])], after_step=0)
    is_over = threading.Event()

    def write() -> None:
        rank.worker.wait_stored(job_id)
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not is_over.wait(0.05)
    rank.worker.executed(0)
    thread.join(10.0)
    assert is_over.is_set()


def test_a_store_that_hangs_is_an_error_of_the_step(tmp_path: Path) -> None:
    rank = OffloadRank(tmp_path, has_disk=False)
    rank.worker._timing = type(rank.worker._timing)(store_timeout_s=0.05)
    with pytest.raises(ConnectorError, match="has not ended within"):
        rank.worker.wait_stored(rank.begin(CopyKind.STORE, [part_of([1])], after_step=5))
    rank.close()


def test_blocks_are_stored_before_later_jobs_load_into_them(rank: OffloadRank) -> None:
    rank.run(CopyKind.STORE, part_of([1], first=20))
    before = rank.pool.copy()
    rank.begin(CopyKind.STORE, [part_of([2])], after_step=0)
    rank.begin(CopyKind.LOAD, [part_of([2], first=20)])
    rank.worker.executed(0)
    assert [rank.events.get(timeout=10.0).job_id for _ in range(2)] == [2, 3]
    rank.run(CopyKind.LOAD, part_of([3]))
    assert (block_of(rank.pool, 2) == block_of(before, 1)).all()
    assert (block_of(rank.pool, 3) == block_of(before, 2)).all()


def test_a_store_passes_a_load_that_waits_for_the_step_that_waits_for_the_store(rank: OffloadRank) -> None:
    rank.run(CopyKind.STORE, part_of([1], first=20))
    rank.begin(CopyKind.LOAD, [part_of([2], first=20)], after_step=1)
    job_id = rank.begin(CopyKind.STORE, [part_of([3])], after_step=0)
    rank.worker.executed(0)
    rank.worker.wait_stored(job_id)
    rank.worker.executed(1)
    assert [rank.events.get(timeout=10.0).job_id for _ in range(2)] == [job_id, job_id - 1]


def damage(rank: OffloadRank, offset: int) -> None:
    with rank.disk_path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("offset", [4096 + 10, 4096 + 64 + 5])  # of the first unit's record: its name, its content
def test_damage_on_disk_is_a_failed_copy_and_no_byte_lands(rank: OffloadRank, offset: int) -> None:
    for kind in (CopyKind.STORE, CopyKind.DEMOTE):
        rank.run(kind, part_of([1]))
    damage(rank, offset)
    before = rank.pool.copy()
    event = rank.run(CopyKind.FETCH, part_of([9]))
    assert not event.is_done
    assert "another block" in event.reason or "checksum" in event.reason
    assert (rank.pool == before).all()


def test_a_block_that_was_never_written_to_disk_is_not_read(rank: OffloadRank) -> None:
    assert not rank.run(CopyKind.FETCH, part_of([9])).is_done


def test_copies_beyond_a_region_fail(rank: OffloadRank) -> None:
    assert "beyond its" in rank.run(CopyKind.STORE, part_of([LAYOUT.num_blocks + 5])).reason
    assert "beyond its" in rank.run(CopyKind.LOAD, part_of([1], first=200)).reason


def test_a_copy_to_a_disk_that_there_is_not_fails(tmp_path: Path) -> None:
    rank = OffloadRank(tmp_path, has_disk=False)
    assert "has none" in rank.run(CopyKind.DEMOTE, part_of([1])).reason
    rank.close()


def test_closing_ends_a_worker_whose_jobs_wait(tmp_path: Path) -> None:
    rank = OffloadRank(tmp_path)
    rank.begin(CopyKind.STORE, [part_of([1])], after_step=99)
    rank.begin(CopyKind.FETCH, [part_of([1])], after_step=99)
    rank.close()
    assert not list(tmp_path.iterdir())


def test_a_restarted_worker_finds_the_bytes_of_a_killed_one(tmp_path: Path) -> None:
    command = [sys.executable, str(MAIN), str(tmp_path), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": str(MAIN.parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stored\n"
        process.send_signal(signal.SIGKILL)
    assert remove_leftovers(tmp_path) == []  # the owner, this process, is alive
    rank = OffloadRank(tmp_path)
    assert rank.is_found
    expected = rank.pool.copy()
    for kind in (CopyKind.LOAD, CopyKind.FETCH):
        rank.pool[:] = 0
        assert rank.run(kind, part_of([11, 12, 13, 14])).is_done
        for source, target in ((1, 11), (2, 12), (3, 13), (4, 14)):
            assert (block_of(rank.pool, target) == block_of(expected, source)).all(), kind
    rank.close()


def dead_owner() -> FileOwner:
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = FileOwner.of(process.pid)
        process.kill()
    return owner


def test_files_of_dead_owners_are_removed_and_others_stay(tmp_path: Path) -> None:
    alive = FileOwner.of(os.getpid())
    for name, owner in (("dead", dead_owner()), ("alive", alive)):
        file = open_tier_file(tmp_path / f"blockferry-tier-{name}", 100, fingerprint=b"f" * 32, owner=owner)
        os.close(file.descriptor)
    (tmp_path / "blockferry-tier-notes").write_text("somebody's notes")
    assert [path.name for path in remove_leftovers(tmp_path)] == ["blockferry-tier-dead"]


def test_a_file_that_is_in_use_stays_though_its_owner_is_dead(tmp_path: Path) -> None:
    file = open_tier_file(tmp_path / "blockferry-tier-x", 100, fingerprint=b"f" * 32, owner=dead_owner())
    assert remove_leftovers(tmp_path) == []
    os.close(file.descriptor)
    assert len(remove_leftovers(tmp_path)) == 1


def test_a_deployment_that_ends_removes_what_its_killed_workers_left(tmp_path: Path) -> None:
    owner = FileOwner.of(os.getpid())
    files = {
        name: open_tier_file(tmp_path / f"blockferry-tier-{name}", 100, fingerprint=b"f" * 32, owner=owner)
        for name in ("mine-m0-0", "mine-m0-1", "others-m0-0")
    }
    for name in ("mine-m0-0", "others-m0-0"):
        os.close(files[name].descriptor)
    remove_unused(tmp_path, "blockferry-tier-mine-")
    assert {path.name for path in tmp_path.iterdir()} == {"blockferry-tier-mine-m0-1", "blockferry-tier-others-m0-0"}
    os.close(files["mine-m0-1"].descriptor)


def test_a_file_that_another_deployment_uses_is_not_taken_over(tmp_path: Path) -> None:
    path, owner = tmp_path / "blockferry-tier-x", FileOwner.of(os.getpid())
    file = open_tier_file(path, 100, fingerprint=b"f" * 32, owner=owner)
    with pytest.raises(OffloadError, match="in use by another deployment"):
        open_tier_file(path, 200, fingerprint=b"f" * 32, owner=owner)
    os.close(file.descriptor)


def test_content_of_another_kind_is_not_found_again(tmp_path: Path) -> None:
    path, owner = tmp_path / "blockferry-tier-x", FileOwner.of(os.getpid())
    first = open_tier_file(path, 100, fingerprint=b"f" * 32, owner=owner)
    os.pwrite(first.descriptor, b"content", 4096)
    os.close(first.descriptor)
    second = open_tier_file(path, 100, fingerprint=b"g" * 32, owner=owner)
    assert not second.is_found
    assert os.pread(second.descriptor, 7, 4096) == bytes(7)
    os.close(second.descriptor)


def test_a_tier_without_room_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="lower the tier's gib"):
        open_tier_file(tmp_path / "blockferry-tier-x", 1 << 60, fingerprint=b"f" * 32, owner=FileOwner.of(os.getpid()))
    assert not list(tmp_path.iterdir())


def test_a_part_counts_its_blocks_on_either_side() -> None:
    assert part_of([1, 2]).num_blocks == 2
    assert CopyPart(group=0, units=np.zeros((3, 2), np.int32)).num_blocks == 3
