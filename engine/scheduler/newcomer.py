"""A request on its way in: its hashes and what every instance has of it, worked out once and without effect.

Reads ledgers, tiers and queues; takes, touches and counts nothing. As all of them live in the scheduler's process,
this is an exact answer of this moment, and no index has to be kept up from events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from blockferry.engine.kv.block_hash import RequestHashes, encoder_key
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.manager import HashRule, KVCacheManager
from blockferry.engine.request import Request
from blockferry.engine.scheduler.instance import Instance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one instance has of a request."""

    num_tokens: int  # of the request
    num_held_tokens: int  # of those: in its pool or its tiers, or computed there before this request's turn comes
    has_room: bool  # the blocks that it will take beside those are free now

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that would have to be computed, or ferried, there."""
        return self.num_tokens - self.num_held_tokens


class Newcomer:
    """One request before it has a route. Used within one pass of the scheduler's thread."""

    def __init__(self, request: Request, instances: Mapping[str, Instance]) -> None:
        self._request = request
        self.token_ids = request.given_token_ids  # prompt and output so far, what is looked up
        self._instances = instances
        self._hashes: dict[HashRule, RequestHashes] = {}
        self._found: dict[str, Found] = {}

    @property
    def key(self) -> bytes:
        """The same for equal prompts: the last digest made for it; empty while there is none."""
        return next((one.digests[-1] for one in self._hashes.values() if one.digests), b"")

    def found_on(self, instance_id: str) -> Found:
        """What an instance has of the request. Cost: hashing, once per hash block size, and one lookup."""
        found = self._found.get(instance_id)
        if found is None:
            found = self._found[instance_id] = self._look_up(self._instances[instance_id])
        return found

    def num_known_tokens(self, instance_id: str) -> int:
        """num_held_tokens, if anybody has asked for it; else 0."""
        found = self._found.get(instance_id)
        return 0 if found is None else found.num_held_tokens

    def take_hashes(self, kv: KVCacheManager) -> RequestHashes:
        """The request's hashes as a ledger makes them; the caller's own."""
        return self._hashed(kv).copy()

    def _hashed(self, kv: KVCacheManager) -> RequestHashes:
        rule, request = kv.hash_rule, self._request
        hashes = self._hashes.get(rule)
        if hashes is None:
            hashes = self._hashes[rule] = kv.hash_prompt(
                self.token_ids,
                cache_salt=request.cache_salt,
                extra_keys=encoder_key(request.encoder_token_ids),
            )
        return hashes

    def _look_up(self, instance: Instance) -> Found:
        kv, request = instance.kv, self._request
        num_tokens = len(self.token_ids)
        hit: PrefixHit | None = None
        num_held_tokens = 0
        if not request.skip_reading_prefix_cache and request.sampling.num_prompt_logprobs is None:
            hashes = self._hashed(kv)
            hit = kv.lookup(hashes, num_tokens)
            num_stored = hit.num_tokens + instance.tiers.num_loadable_tokens(hashes, num_tokens, hit)
            num_held_tokens = max(num_stored, min(instance.num_coming_tokens(hashes), num_tokens - 1))
        num_encoder_tokens = 0 if request.encoder_token_ids is None else len(request.encoder_token_ids)
        num_blocks = kv.room.to_hold(num_tokens, hit, num_encoder_tokens)
        return Found(num_tokens=num_tokens, num_held_tokens=num_held_tokens, has_room=num_blocks <= kv.num_free_blocks)
