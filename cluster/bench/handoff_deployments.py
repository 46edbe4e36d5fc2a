"""The deployments that `bench handoff` brings up side by side, made from two files. Pure; starts nothing."""

from __future__ import annotations

import dataclasses
import os

from blockferry.cluster.bench.handoff import AFTER, MIXED, NUM_OUTPUT_TOKENS, OVERLAPPED
from blockferry.cluster.deployment import Deployment, is_disaggregated
from blockferry.connectors.base import Overlap
from blockferry.engine.config import Role
from blockferry.engine.errors import ConfigError


def handoff_deployments(apart: Deployment, mixed: Deployment, *, num_prompt_tokens: int) -> dict[str, Deployment]:
    """What to bring up, by the names of the results; the mixed one first. Raises ConfigError.

    All get the mixed one's threads per worker: times with unlike threads say nothing about handing over. Names and
    ports are made so that they can run beside each other and beside others.
    """
    if not is_disaggregated(apart.config):
        raise ConfigError(
            "--config", f"{apart.config.name!r} has no prefill and decode instances; nothing is handed over"
        )
    if is_disaggregated(mixed.config):
        raise ConfigError(
            "--baseline", f"{mixed.config.name!r} has prefill and decode instances; give a mixed deployment"
        )
    _check_same("path", apart.config.model.path, mixed.config.model.path)
    _check_same("dtype", apart.config.model.dtype, mixed.config.model.dtype)
    _check_same("max_model_len", apart.config.model.max_model_len, mixed.config.model.max_model_len)
    longest = mixed.config.model.max_model_len
    if num_prompt_tokens + NUM_OUTPUT_TOKENS > longest:
        raise ConfigError(
            "--prompt-tokens",
            f"{num_prompt_tokens} and {NUM_OUTPUT_TOKENS} to generate exceed max_model_len={longest}; use fewer",
        )
    num_threads = mixed.config.instances[0].num_threads
    found = {MIXED: mixed, AFTER: _without_overlap(apart)}
    if apart.config.connector.overlap != Overlap.NONE:
        found[OVERLAPPED] = apart
    return {name: _beside_others(one, name, num_threads=num_threads) for name, one in found.items()}


def mixed_like(apart: Deployment) -> Deployment:
    """A deployment that does with one mixed instance what `apart` does with several, shaped like its first one."""
    instance = dataclasses.replace(apart.config.instances[0], role=Role.MIXED, replicas=1)
    config = dataclasses.replace(apart.config, instances=(instance,))
    return dataclasses.replace(apart, config=config)


def _without_overlap(deployment: Deployment) -> Deployment:
    """The same with blocks ferried once the whole prompt is computed."""
    connector = dataclasses.replace(deployment.config.connector, overlap=Overlap.NONE)
    return dataclasses.replace(deployment, config=dataclasses.replace(deployment.config, connector=connector))


def _check_same(name: str, mine: object, other: object) -> None:
    if mine != other:
        raise ConfigError("--baseline", f"model.{name} is {other} there and {mine} in --config; use one model alike")


def _beside_others(deployment: Deployment, name: str, *, num_threads: int) -> Deployment:
    config = deployment.config
    instances = tuple(dataclasses.replace(one, num_threads=num_threads) for one in config.instances)
    api = dataclasses.replace(config.api, host="127.0.0.1", port=0)
    config = dataclasses.replace(config, name=f"bench-{name}-{os.getpid()}", instances=instances, api=api)
    return dataclasses.replace(deployment, config=config)
