"""Whether the two instances of a route can run a request at all, and how long it may get on them. Changes nothing."""

from __future__ import annotations

from blockferry.engine.request import Request
from blockferry.engine.scheduler import admission
from blockferry.engine.scheduler.instance import Instance


def check_route(request: Request, source: Instance, target: Instance) -> None:
    """Raises RequestRejected for what could never run where its prompt is computed on source and decoded on target.

    QueueFull where it could, but not now. One mixed instance may be both.
    """
    admission.check_encoder_input(request, max_num_encoder_tokens=source.kv.max_num_encoder_tokens)
    admission.check_lengths(request, max_model_len=_max_model_len(source, target))
    num_given_tokens = request.num_given_tokens
    admission.check_fits_pool(request, source.kv, num_tokens=num_given_tokens, instance_id=source.instance_id)
    num_stored = max(num_given_tokens, token_limit(request, source, target) - 1)
    admission.check_fits_pool(request, target.kv, num_tokens=num_stored, instance_id=target.instance_id)
    admission.check_queue(
        request,
        num_waiting=len(source.queue),
        max_queue_len=source.config.max_queue_len,
        instance_id=source.instance_id,
    )


def token_limit(request: Request, source: Instance, target: Instance) -> int:
    """Number of tokens, prompt included, at which a request ends for length."""
    return admission.token_limit(request, max_model_len=_max_model_len(source, target))


def _max_model_len(source: Instance, target: Instance) -> int:
    return min(source.rows.max_model_len, target.rows.max_model_len)
