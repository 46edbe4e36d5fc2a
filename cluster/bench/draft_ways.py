"""Ways to draft that `bench draft-steps` holds against each other: deployments that differ in nothing else, an oracle.

Measures nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.cluster.deployment import Deployment
from blockferry.cluster.speculation_settings import WHERE, check_speculation, read_speculation
from blockferry.cluster.yaml_reader import Section
from blockferry.engine.config import DraftMethod, InstanceConfig, SpeculationConfig
from blockferry.engine.errors import ConfigError
from blockferry.engine.request import Int32Array
from blockferry.engine.wire import NO_DRAFT, StepPlan, StepResult

OWN = "own"  # instead of a head's name: the checkpoint's modules
OPTIONS = {f"{WHERE}.num_tokens": "--drafts", f"{WHERE}.head": "--head"}  # of the command, by the key they are put into


def ways_to_draft(
    deployment: Deployment, head: str, num_drafts: Sequence[int], *, is_adaptive: bool
) -> list[SpeculationConfig]:
    """N-grams and, where a head is named, MTP without and with lookup; each with all numbers of drafts.

    Raises ConfigError.
    """
    sources: list[dict[str, object]] = [{"method": DraftMethod.NGRAM.value}]
    if head:
        modules: dict[str, object] = {"method": DraftMethod.MTP.value, "head": None if head == OWN else head}
        sources += [modules, modules | {"lookup": True}]
    config, ways = deployment.config, []
    for source in sources:
        for count in num_drafts:
            section = Section(WHERE, source | {"num_tokens": count, "adaptive": is_adaptive})
            try:
                way = read_speculation(section, Path())
                assert way is not None, "a method is written"
                check_speculation(way, config.model, deployment.header, config.instances[:1])
            except ConfigError as error:
                raise ConfigError(OPTIONS.get(error.path, error.path), error.reason) from error
            ways.append(way)
    return ways


def name_of(way: SpeculationConfig) -> str:
    """Of who drafts."""
    return f"{way.method}+lookup" if way.looks_up else way.method.value


def one_instance(deployment: Deployment, *, num_threads: int) -> Deployment:
    """The deployment's first instance alone, without prefix caching; num_threads: of torch, or 0 for its own number.

    Raises ConfigError.
    """
    shape = deployment.config.instances[0]
    if shape.tensor_parallel * shape.pipeline_parallel > 1:
        raise ConfigError("instances[0]", "has several ranks, which one process does not hold; measure one of one rank")
    # a prompt that is found in the cache is computed in other parts, by other kernels, and may be answered otherwise
    cache = dataclasses.replace(shape.cache, enable_prefix_caching=False)
    return _with_shape(
        deployment, dataclasses.replace(shape, num_threads=num_threads or shape.num_threads, cache=cache)
    )


def drafting_by(deployment: Deployment, way: SpeculationConfig | None) -> Deployment:
    """A deployment of one instance, drafting that way; None: not at all."""
    shape = deployment.config.instances[0]
    return _with_shape(
        deployment, dataclasses.replace(shape, scheduler=dataclasses.replace(shape.scheduler, speculation=way))
    )


def _with_shape(deployment: Deployment, shape: InstanceConfig) -> Deployment:
    return dataclasses.replace(deployment, config=dataclasses.replace(deployment.config, instances=(shape,)))


class Oracle:
    """Proposes one request's known answer, wrong with a given probability at every position."""

    def __init__(self, share: float, prompt: Int32Array, answer: Sequence[int]) -> None:
        """`share` of the drafts are right; which, is the same every time."""
        self._share = share
        self._tokens = np.concatenate([prompt, np.array(answer, np.int32)])
        self._draw = np.random.default_rng(len(prompt))

    def __call__(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with these proposals."""
        num_drafts = plan.num_proposals
        if not num_drafts or not len(result.token_ids):
            return result
        end = int(plan.num_computed[0] + plan.num_scheduled[0]) + len(result.token_ids)
        if len(plan.num_drafts):
            end -= int(plan.num_drafts[0])
        known = self._tokens[end : end + num_drafts]
        is_wrong = self._draw.random(len(known)) >= self._share
        drafts = np.full((1, num_drafts), NO_DRAFT, np.int32)
        drafts[0, : len(known)] = np.where(is_wrong, known ^ 1, known)  # another token of any vocabulary of even size
        return dataclasses.replace(result, proposals=drafts)
