"""A single inference request: load its prefix, extend it, store its blocks.

Checks arguments in the caller's thread and starts jobs. The jobs decide what to load or store, and copy the
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from kvoffload.cache.jobs import Jobs, Work
from kvoffload.cache.key_chain import KEY_BYTES, GivenKeys, KeyChain, Tokens
from kvoffload.cache.kv_layout import KVLayout, KVTensors
from kvoffload.cache.owner import Limit, Owner
from kvoffload.cache.place import BlockIds, Place
from kvoffload.core.hints import Hints
from kvoffload.errors import ConfigError, MisuseError, check_integer, finite
from kvoffload.structures.keys import Keys


class KVRequest:
    """A single inference request, from `KVCache.request`.

    Only whole blocks are loaded and stored. Methods whose names end in ``_async`` are for `asyncio`. If an
    ``_async`` call is cancelled while it copies, the call ends only after the copy has ended.

    Use the request as a context manager. On exit the request reports to the policies which blocks it used; it
    stores nothing. Call `store_from` to store blocks. Thread: one at a time.
    """

    def __init__(
        self,
        chain: KeyChain | GivenKeys,
        hints: Hints,
        owner: Owner,
        jobs: Jobs,
        layout: KVLayout,
        deadline_s: float,
    ) -> None:
        self._chain, self._num_computed = chain, chain.num_tokens
        self._work = Work(hints, jobs.num_resets)
        self._owner, self._jobs, self._layout, self._deadline_s = owner, jobs, layout, deadline_s

    @property
    def num_tokens(self) -> int:
        """Tokens of the request so far."""
        return self._chain.num_tokens

    def load_into(
        self,
        kv: KVTensors,
        block_ids: BlockIds | None = None,
        *,
        row: int | None = None,
        start: int = 0,
        present: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Load the longest cached prefix into the engine's tensors; return how many leading tokens the engine
        need not compute.

        If the request has token ids, returns at most `num_tokens - 1`, because the engine must compute the
        last token for its logits. A full last block is loaded completely nevertheless.

        Args:
            kv: the engine's tensors, in the layout of the cache (`KVLayout`).
            block_ids: the engine's blocks for the request, in order.
            row, start: for tensors with the axis ``batch`` instead of ``block``: the row of the sequence, and
                the position of its first token.
            present: number of leading tokens that the tensors already hold. The result includes these tokens,
                and their full blocks are not loaded.
            timeout_s: longest wait for tiers, in seconds. Default and maximum: the cache's `deadline_s`.

        Raises: `ConfigError` for tensors or blocks that do not fit the layout, before any byte moves.
        """
        job, limit = self._loading(kv, Place(block_ids, row, start), present, timeout_s)
        return self._usable(self._owner.run(job, limit), present)

    async def load_into_async(
        self,
        kv: KVTensors,
        block_ids: BlockIds | None = None,
        *,
        row: int | None = None,
        start: int = 0,
        present: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Load the longest cached prefix, as `load_into`."""
        job, limit = self._loading(kv, Place(block_ids, row, start), present, timeout_s)
        return self._usable(await self._owner.run_async(job, limit), present)

    def extend(self, token_ids: Tokens) -> None:
        """Append generated tokens. If the request was created with `keys`, append further keys instead.

        The policies learn of the appended blocks at the next `store_from` or `load_into`. If there is no such
        call, `finish` does not report the appended blocks. Exception: `finish` reports all blocks of a
        request that has neither loaded nor stored.
        """
        before = self._chain.num_tokens
        self._chain.extend(token_ids)
        if self._chain.num_tokens > before:
            self._num_computed = self._chain.num_tokens - isinstance(self._chain, KeyChain)

    def store_from(
        self,
        kv: KVTensors,
        block_ids: BlockIds | None = None,
        *,
        row: int | None = None,
        start: int = 0,
        num_tokens: int | None = None,
    ) -> int:
        """Store the request's full blocks that RAM lacks; return the number of stored tokens.

        The blocks are copied from the engine's tensors, which may change after the call. A block is not
        stored if RAM has no room, or if the policy or the admission rule refuses the block.

        Args:
            kv, block_ids, row, start: as for `load_into`.
            num_tokens: number of leading tokens whose KV is computed. Default: all tokens. But after `extend`
                with token ids, the default leaves out the last token, because engines compute the KV of a
                sampled token in the next step.

        Raises: as `load_into`.
        """
        job = self._storing(kv, Place(block_ids, row, start), num_tokens)
        return self._layout.block_tokens * self._owner.run(job, Limit(math.inf))

    async def store_from_async(
        self,
        kv: KVTensors,
        block_ids: BlockIds | None = None,
        *,
        row: int | None = None,
        start: int = 0,
        num_tokens: int | None = None,
    ) -> int:
        """Store the full blocks that RAM lacks, as `store_from`."""
        job = self._storing(kv, Place(block_ids, row, start), num_tokens)
        return self._layout.block_tokens * await self._owner.run_async(job, Limit(math.inf))

    def finish(self) -> None:
        """End the request, after its running jobs. A second call does nothing."""
        with self._if_open():
            self._owner.run(self._jobs.finish(self._work, self._keys()), Limit(math.inf))

    async def finish_async(self) -> None:
        """End the request, as `finish`."""
        with self._if_open():
            await self._owner.run_async(self._jobs.finish(self._work, self._keys()), Limit(math.inf))

    def __enter__(self) -> KVRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    async def __aenter__(self) -> KVRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish_async()

    # ---- private

    @contextmanager
    def _if_open(self) -> Iterator[None]:
        """Suppress the `MisuseError` of a closed cache, because another thread may close the cache at any
        time."""
        try:
            yield
        except MisuseError:
            if not self._owner.is_closed:
                raise

    def _keys(self, count: int | None = None) -> Keys:
        return Keys.pack(self._chain.keys[:count], KEY_BYTES)

    def _usable(self, num_blocks: int, present: int) -> int:
        tokens = max(present, num_blocks * self._layout.block_tokens)
        at_most = self.num_tokens - isinstance(self._chain, KeyChain)
        return max(0, min(tokens, at_most))

    def _loading(
        self, kv: KVTensors, place: Place, present: int, timeout_s: float | None
    ) -> tuple[Coroutine[Any, Any, int], Limit]:
        """Check the arguments of a load; return the job and its time limit."""
        present = self._checked_tokens("present", present)
        parts, ids = place.in_tensors(kv, self._layout, self._jobs.pins, writeable=True)
        limit = Limit(self._deadline_s if timeout_s is None else self._checked_timeout(timeout_s))
        first = min(len(ids), present // self._layout.block_tokens)
        return self._jobs.load(self._work, self._keys(len(ids)), first, parts, ids, limit), limit

    def _storing(self, kv: KVTensors, place: Place, num_tokens: int | None) -> Coroutine[Any, Any, int]:
        """Check the arguments of a store; return the job."""
        computed = self._num_computed if num_tokens is None else num_tokens
        computed = self._checked_tokens("num_tokens", computed)
        parts, ids = place.in_tensors(kv, self._layout, self._jobs.pins)
        count = min(len(ids), computed // self._layout.block_tokens)
        return self._jobs.store(self._work, self._keys(count), parts, ids)

    def _checked_tokens(self, field: str, value: object) -> int:
        """Return `value` as a number of the request's tokens. Raises `ConfigError` unless it is from 0 to
        `num_tokens`.
        """
        return check_integer(field, value, self.num_tokens, 0, "the tokens of the request")

    def _checked_timeout(self, timeout_s: object) -> float:
        if 0.0 <= (seconds := finite(timeout_s)) <= self._deadline_s:
            return seconds
        allowed = f"allowed: 0 to {self._deadline_s:g} seconds, the cache's deadline_s"
        raise ConfigError("timeout_s", timeout_s, allowed)
