"""Request parameters to the engine's SamplingParams, with the model's limits and defaults applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blockferry.cluster.api.errors import ApiError, shown
from blockferry.cluster.api.prompts import check_token_ids
from blockferry.cluster.api.schemas import SamplingFields
from blockferry.cluster.api.served_model import ServedModel
from blockferry.engine.request import SamplingParams

SEED_SPAN = 1 << 63


def sampling_of(
    fields: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> Callable[[int], SamplingParams]:
    """Build the parameters of choice 0, 1, ...: they differ in their seed only. Raises ApiError."""
    stop_ids = list(fields.stop_token_ids or ())
    check_token_ids(stop_ids, model.vocab_size, "stop_token_ids")
    if not fields.ignore_eos:
        stop_ids.extend(model.eos_token_ids)
    logit_bias = _logit_bias(fields.logit_bias or {}, model.vocab_size)
    defaults = model.default_sampling

    def pick(name: str, value: float | None, otherwise: float) -> float:
        return float(defaults.get(name, otherwise)) if value is None else value

    def build(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(fields.min_tokens or 0, max_tokens),
            temperature=pick("temperature", fields.temperature, 1.0),
            top_k=max(int(pick("top_k", fields.top_k, 0)), 0),
            top_p=pick("top_p", fields.top_p, 1.0),
            min_p=pick("min_p", fields.min_p, 0.0),
            seed=None if fields.seed is None else (fields.seed + index) % SEED_SPAN,
            repetition_penalty=pick("repetition_penalty", fields.repetition_penalty, 1.0),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            logit_bias=logit_bias,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    return build


def room_for(fields: SamplingFields, model: ServedModel, *, num_prompt_tokens: int, default: int | None) -> int:
    """How many tokens may be generated. `default` None means: as many as fit.

    Raises ApiError when more were asked for than the model's context has room for.
    """
    room = model.max_model_len - num_prompt_tokens
    asked = fields.token_limit
    if asked is None:
        if room < 1:
            raise _too_long(model, num_prompt_tokens, 1, "prompt")
        return room if default is None else min(default, room)
    if asked > room:
        raise _too_long(model, num_prompt_tokens, asked, "max_tokens")
    return asked


def _too_long(model: ServedModel, num_prompt_tokens: int, asked: int, param: str) -> ApiError:
    return ApiError(
        f"the model's context is {model.max_model_len} tokens; the prompt has {num_prompt_tokens} and "
        f"max_tokens={asked} more do not fit; shorten the prompt or ask for at most "
        f"{max(model.max_model_len - num_prompt_tokens, 0)}",
        param=param,
        code="context_length_exceeded",
    )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and int(key) < vocab_size):
            raise ApiError(f"logit_bias: {shown(key)} is not a token id of 0..{vocab_size - 1}", param="logit_bias")
        result[int(key)] = bias
    return result
