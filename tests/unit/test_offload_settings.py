"""The `offload` section of an instance: what it becomes, what is refused, what this machine has room for."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.deployments import LLAMA

from blockferry.cluster import messages
from blockferry.cluster.check import check_machine
from blockferry.cluster.deployment import Deployment, load_deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.messages import Tag
from blockferry.cluster.offload_settings import tier_settings
from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart
from blockferry.engine.config import OffloadConfig
from blockferry.engine.errors import ConfigError

MIXED = "name: test\nmodel: {path: model}\ncache: {memory: 8MiB}\ninstances:\n  - {role: mixed, offload: %s}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def load(folder: Path, offload: str, *, rest: str = "") -> Deployment:
    file = folder / "deployment.yaml"
    file.write_text(MIXED % offload + rest)
    return load_deployment(file)


def test_a_section_becomes_tiers(folder: Path) -> None:
    text = "{cpu_gib: 0.5, policy: arc, store: on_eviction, disk: {path: /tmp/tiers, gib: 1}}"
    deployment = load(folder, text)
    (instance,) = deployment.config.instances
    assert instance.offload == OffloadConfig(
        cpu_gib=0.5, policy="arc", store="on_eviction", disk_path=Path("/tmp/tiers"), disk_gib=1.0
    )
    plan = plan_of(deployment.config.model, deployment.header, instance, where="")
    tiers = tier_settings(plan, instance, where="")
    assert tiers is not None
    page_bytes = 4 * 3 * 16 * 8 * 2 * 2  # layers, KV heads, tokens, head dim, K and V, bfloat16
    assert tiers.memory_bytes(0) == (2**29 // page_bytes) * page_bytes
    assert tiers.num_disk_units == 2**30 // page_bytes


def test_without_a_section_there_are_no_tiers(folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text((MIXED % "x").replace(", offload: x", ""))
    assert load_deployment(file).config.instances[0].offload is None


@pytest.mark.parametrize(
    ("offload", "rest", "words"),
    [
        ("{cpu_gib: 1, policy: fifo}", "", "offload.policy: 'fifo'"),
        ("{cpu_gib: 1, disk: {path: /tmp}}", "", "needs both `path` and `gib`"),
        ("{cpu_gib: 0.000001}", "", "offload.cpu_gib: 1e-06 GiB hold no block; use"),
        ("{cpu_gib: 1, disk: {path: /tmp, gib: 0.000001}}", "", "offload.disk.gib: 1e-06 GiB hold no block"),
        ("{cpu_gib: 1}", "device: cuda\n", "blocks in GPU memory cannot be offloaded yet"),
        ("{cpu_gib: 1, size: 3}", "", "size"),
    ],
)
def test_mistakes_are_refused_by_key(folder: Path, offload: str, rest: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, offload, rest=rest)
    assert words in str(caught.value)


def test_offload_without_prefix_cache_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is found without enable_prefix_caching"):
        load(folder, "{cpu_gib: 1}, cache: {enable_prefix_caching: false}")


def test_offload_of_a_decode_instance_is_refused(folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text(
        (MIXED % "{cpu_gib: 1}").replace("role: mixed", "role: prefill") + "  - {role: decode, offload: {cpu_gib: 1}}\n"
    )
    with pytest.raises(ConfigError, match="offload there"):
        load_deployment(file)


@pytest.mark.parametrize(
    ("offload", "subjects"),
    [
        ("{cpu_gib: 0.01}", set()),
        ("{cpu_gib: 100000}", {"memory", "/dev/shm"}),
        ("{cpu_gib: 0.01, disk: {path: /tmp/tiers, gib: 1000000}}", {"offload.disk"}),
    ],
)
def test_tiers_that_this_machine_has_no_room_for_are_found(folder: Path, offload: str, subjects: set[str]) -> None:
    findings = list(check_machine(load(folder, offload)))
    assert {one.subject for one in findings if one.is_error} == subjects
    assert any("units of" in one.message for one in findings if one.subject == "offload")


def test_copies_and_their_ends_survive_the_trip() -> None:
    part = CopyPart(
        group=1,
        block_ids=np.array([4, 5], np.int32),
        units=np.array([[1, 2], [3, 4]], np.int32),
        digests=b"d" * 56,
    )
    command = CopyCommand(job_id=3, kind=CopyKind.FETCH, after_step=7, parts=(part,))
    tag, payload = messages.split(messages.encode(Tag.COPY, command))
    again = messages.copy_from(payload)
    assert (tag, again.job_id, again.kind, again.after_step) == (Tag.COPY, 3, CopyKind.FETCH, 7)
    assert again.parts[0].block_ids.tolist() == [4, 5]
    assert again.parts[0].units.tolist() == [[1, 2], [3, 4]]
    assert again.parts[0].disk_units.shape == (0, 0)
    assert again.parts[0].digest(1) == b"d" * 28
    event = CopyEvent(job_id=3, instance_id="m0", rank=1, is_done=False, num_bytes=9, duration_s=0.5, reason="torn")
    assert messages.copied_from(messages.split(messages.encode(Tag.COPIED, event))[1]) == event
