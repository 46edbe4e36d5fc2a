"""What a server's drafts brought during a measurement, from its /metrics before and after: ours, or vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from blockferry.cluster.bench.report import ParamValue, Result
from blockferry.cluster.draft_counts import ACCEPTED, DRAFTED, DRAFTS, DraftCounts

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=10)


async def ask_counts(session: aiohttp.ClientSession, url: str) -> DraftCounts | None:
    """Of the server whose base URL, which ends in /v1, this is; None where it shows none."""
    try:
        async with session.get(f"{url.removesuffix('/v1')}/metrics", timeout=_ASK_TIMEOUT) as response:
            return counts_in(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None  # a server without metrics can be measured all the same


def counts_in(text: str) -> DraftCounts | None:
    """Sums over all instances that a /metrics page shows; None where nothing is drafted. Raises ValueError."""
    found: dict[str, list[float]] = {DRAFTS: [], DRAFTED: [], ACCEPTED: []}
    for family in text_string_to_metric_families(text):
        values = found.get(family.name.rpartition(":")[2], [])
        values.extend(sample.value for sample in family.samples if sample.name.endswith("_total"))
    if not all(found.values()):
        return None
    drafts, drafted, accepted = (int(sum(values)) for values in found.values())
    return DraftCounts(num_drafts=drafts, num_drafted=drafted, num_accepted=accepted)


def draft_rows(
    before: DraftCounts | None, after: DraftCounts | None, params: Mapping[str, ParamValue]
) -> Sequence[Result]:
    """Acceptance and tokens per step; none where nothing was drafted in between."""
    counts = None if before is None or after is None else after.since(before)
    if counts is None or not counts.num_drafted:
        return ()
    return (
        Result(name="draft_acceptance", params=params, unit="1", runs=[counts.acceptance]),
        Result(name="tokens_per_step", params=params, unit="tok", runs=[counts.tokens_per_step]),
    )
