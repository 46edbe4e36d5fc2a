"""The scheduler's actor and its watch over processes, while instances without models come and go."""

import time

import pytest
import ray
from support.loops import MAX_MODEL_LEN, instance_settings

from blockferry.cluster import ray_session
from blockferry.cluster.actors import SchedulerActor
from blockferry.cluster.ray_session import NAMESPACE
from blockferry.cluster.scheduler_host import SchedulerSettings, WorkerPlace
from blockferry.engine.config import Role

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def start_rank(instance_id: str):
    """A process with a worker's loop that never has anything to compute."""

    class IdleRank:
        def place(self):
            return None

        def run(self, endpoints, _node_id):
            from blockferry.cluster.worker_loop import WorkerLoop, WorkerTiming

            self.loop = WorkerLoop(instance_id=instance_id, rank=0, executor=None, timing=WorkerTiming(beat_s=0.1))
            self.loop.run(endpoints.local, None)
            return self.loop.stop_reason

    return ray.remote(IdleRank).options(num_cpus=0, max_concurrency=2).remote()


class Deployment:
    """One scheduler's actor and the ranks that were started for it."""

    def __init__(self):
        self.scheduler = ray.remote(SchedulerActor).options(num_cpus=0, max_concurrency=8, namespace=NAMESPACE).remote()
        self.ranks = {"mixed-0": start_rank("mixed-0")}
        settings = SchedulerSettings(
            deployment="watched",
            model="echo",
            max_model_len=MAX_MODEL_LEN,
            instances=(instance_settings("mixed-0", Role.MIXED),),
            connector=None,
            has_remote_ranks=False,
            workers=(self.place("mixed-0"),),
        )
        ray.get(self.scheduler.prepare.remote(settings, {name: [rank] for name, rank in self.ranks.items()}))
        self.run = self.scheduler.run.remote()
        self.until("mixed-0", "serving")

    @staticmethod
    def place(instance_id: str) -> WorkerPlace:
        return WorkerPlace(instance_id=instance_id, rank=0, address=ray.util.get_node_ip_address(), pid=1)

    def join(self, instance_id: str) -> None:
        self.ranks[instance_id] = start_rank(instance_id)
        settings = instance_settings(instance_id, Role.MIXED)
        call = self.scheduler.add_instance.remote(settings, [self.ranks[instance_id]], (self.place(instance_id),))
        ray.get(call)
        self.until(instance_id, "serving")

    def status(self):
        return ray.get(self.scheduler.status.remote())

    def until(self, instance_id: str, state: str | None) -> None:
        deadline_s = time.monotonic() + 30.0
        while {one["instance_id"]: one["state"] for one in self.status().get("instances", ())}.get(
            instance_id
        ) != state:
            assert time.monotonic() < deadline_s, (instance_id, state, self.status())
            time.sleep(0.05)


@pytest.fixture(scope="module")
def deployment():
    session = ray_session.start_local({"CPU": 2})
    try:
        deployment = Deployment()
        yield deployment
        ray.get(deployment.scheduler.shutdown.remote("the test is over"))
        assert ray.get(deployment.run) == "the test is over"
    finally:
        session.close()


def test_instance_joins_and_another_drains_and_leaves(deployment):
    deployment.join("mixed-1")
    ray.get(deployment.scheduler.drain.remote("mixed-0", 10.0))
    deployment.until("mixed-0", "drained")
    ray.get(deployment.scheduler.remove_instance.remote("mixed-0"))
    status = deployment.status()
    assert [one["instance_id"] for one in status["instances"]] == ["mixed-1"]
    assert [one["instance_id"] for one in status["workers"]] == ["mixed-1"]
    assert (status["healthy"], status["is_serving"]) == (True, True)


def test_instance_whose_process_died_is_replaced_and_forgotten(deployment):
    deployment.join("mixed-2")
    ray.kill(deployment.ranks["mixed-2"])
    deployment.until("mixed-2", "failed")
    deployment.join("mixed-3")
    assert not deployment.status()["healthy"]
    ray.get(deployment.scheduler.remove_instance.remote("mixed-2"))
    deployment.until("mixed-2", None)
    assert deployment.status()["healthy"]


def test_id_of_an_instance_that_has_left_is_refused(deployment):
    with pytest.raises(ValueError, match="there is or was an instance 'mixed-0'"):
        deployment.join("mixed-0")
