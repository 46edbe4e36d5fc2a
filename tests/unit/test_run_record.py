import dataclasses
import os

import pytest

from blockferry.cluster import run_record
from blockferry.cluster.run_record import RunRecord

HERE = RunRecord(
    name="one",
    config_file="one.yaml",
    model_path="/model",
    ray_address="127.0.0.1:1",
    client_endpoint="tcp://127.0.0.1:2",
    secret="s",
    url="",
    pid=os.getpid(),
)
DEAD_PID = 1 << 30  # beyond what Linux hands out


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKFERRY_CACHE", str(tmp_path))


def test_a_deployment_whose_process_lives_is_found():
    run_record.write_record(HERE)
    assert run_record.read_records() == [HERE]
    assert run_record.find_record("one") == HERE


def test_the_note_of_a_dead_process_is_removed():
    path = run_record.write_record(dataclasses.replace(HERE, pid=DEAD_PID))
    assert run_record.read_records() == []
    assert not path.exists()


def test_notes_of_other_hosts_in_a_shared_folder_are_theirs(monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_record, "_this_host", lambda: "elsewhere-1")
        path = run_record.write_record(dataclasses.replace(HERE, pid=DEAD_PID))
    run_record.write_record(HERE)  # of the same name
    assert run_record.read_records() == [HERE]
    assert path.exists()


def test_a_note_is_for_its_owner_only():
    path = run_record.write_record(HERE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(HERE)
