"""The cache for a process that allocates its KV tensors itself. Begins requests, flushes, closes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvoffload.cache.jobs import CacheStats, Jobs, Observer
from kvoffload.cache.key_chain import GivenKeys, KeyChain, Tokens
from kvoffload.cache.kv_layout import KVLayout
from kvoffload.cache.owner import Limit, Owner
from kvoffload.cache.request import KVRequest
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.errors import ConfigError, finite
from kvoffload.tiering.tiered_manager import TieredManager

_FLUSH_S = 10.0


class KVCache:
    """A cache of KV blocks for one process, from `kvoffload.open`::

        with cache.request(token_ids) as request:
            hit = request.load_into(kv, block_ids)      # leading tokens that are present
            ...                                         # compute the other tokens
            request.store_from(kv, block_ids)

    Every load verifies the checksums of its blocks, and a damaged block counts as a miss. Blocks are written
    to the tiers in the background. A later cache on the same disk finds the blocks of earlier caches. With
    shared RAM (``ram="64GiB,shared=node"``) several processes load, store and evict the same blocks.

    Thread: any; the cache's own thread makes all decisions. Use the cache as a context manager, or
    call `close`. Without `close` the process loses the blocks that no tier has written yet.
    """

    def __init__(self, jobs: Jobs, layout: KVLayout, deadline_s: float) -> None:
        self.layout, self.deadline_s = layout, deadline_s
        self._jobs, self._owner = jobs, Owner()

    def request(
        self,
        token_ids: Tokens = (),
        *,
        salt: str | bytes = "",
        keys: Iterable[bytes] | None = None,
        hints: Hints = NO_HINTS,
    ) -> KVRequest:
        """Begin a request. The result is a context manager, also for ``async with``.

        Args:
            token_ids: the prompt, without padding.
            salt: any text, for example a tenant or the hash of an image. Requests with different salts share
                no blocks.
            keys: hashes of 32 bytes instead of `token_ids`, one for each full block. A hash must identify the
                tokens of the block and all tokens before the block.
            hints: labels for the policy.
        """
        if not isinstance(hints, Hints):
            raise ConfigError("hints", hints, "allowed: kvoffload.Hints")
        chain: KeyChain | GivenKeys = KeyChain(self.layout.block_tokens, salt)
        chain.extend(token_ids)
        if keys is not None:
            if chain.num_tokens or salt:
                raise ConfigError("keys", "given", "allowed: without token_ids and salt")
            chain = GivenKeys(self.layout.block_tokens)
            chain.extend(keys)
        return KVRequest(chain, hints, self._owner, self._jobs, self.layout, self.deadline_s)

    @property
    def manager(self) -> TieredManager:
        """The manager of RAM and tiers, for metrics. Only the cache's own thread may call the manager."""
        return self._jobs.manager

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Write all blocks of RAM to every tier that admits them, within `timeout_s` seconds.

        Returns False in three cases: the time is up, a tier failed to write blocks, or a tier dropped blocks
        because it was busy or its write budget was spent. Blocks that an admission rule refuses and blocks
        that a tier evicts do not make the result False. Blocks that another process stores in shared RAM
        during the call may be missing in the tiers.
        """
        limit = _limit("timeout_s", timeout_s)
        return self._owner.run(self._jobs.flush(limit), limit)

    async def flush_async(self, timeout_s: float = _FLUSH_S) -> bool:
        """Like `flush`, as a coroutine."""
        limit = _limit("timeout_s", timeout_s)
        return await self._owner.run_async(self._jobs.flush(limit), limit)

    def reset(self, timeout_s: float = _FLUSH_S) -> bool:
        """Forget every block in RAM and in the tiers, after a change of the weights.

        After the call this process finds none of the blocks. Requests that began before the reset store no
        more blocks, because their KV may come from the old weights.

        Returns False if a tier has not confirmed the reset within `timeout_s` seconds. Then call `reset`
        again. Until a call returns True, other machines may find old blocks in shared tiers, and so may this
        machine after a crash.

        With shared RAM do not call `reset`, but open a cache with a new `model` for new weights: after a
        reset, other processes may still store blocks of the old weights, or load them from their own tiers.
        With shared RAM, the call also returns False if a suspended process (SIGSTOP) holds the lock of RAM.
        """
        limit = _limit("timeout_s", timeout_s)
        return self._owner.run(self._jobs.reset(limit), limit)

    def stats(self) -> CacheStats:
        """Return the counters of the cache."""
        return self._owner.run(self._jobs.stats(), Limit(math.inf))

    def observe(self, observer: Observer) -> None:
        """Report counters to `observer` from now on. An earlier observer no longer receives them.

        `metrics.Collector` calls this.
        """
        self._owner.run(self._jobs.observe(observer), Limit(math.inf))

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """End the running jobs, flush RAM for at most `flush_s` seconds, and close RAM and the tiers.

        Loads that wait for a tier end at once and return the tokens that are present. Later calls raise
        `MisuseError`, except `close` and the end of a request. An interrupt, such as `KeyboardInterrupt`,
        ends the flush. The call then closes RAM and the tiers, and raises the interrupt.
        """
        limit = _limit("flush_s", flush_s)
        self._owner.close(self._jobs.close(limit), limit)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _limit(field: str, seconds: object) -> Limit:
    """Return the time limit of a job; ``inf`` seconds mean no limit. Raises `ConfigError` unless `seconds` is
    0 or more.
    """
    number = seconds if isinstance(seconds, float) and seconds == math.inf else finite(seconds)
    if not number >= 0.0:
        raise ConfigError(field, seconds, "allowed: seconds, 0 or more")
    return Limit(number)
