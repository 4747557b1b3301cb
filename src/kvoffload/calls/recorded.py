"""A manager that records its calls, with results.

The kernels of `OffloadingManager` append most calls to the log. `RecordedManager` appends three other kinds
of records:

- calls whose kernels append nothing
- hints
- exceptions of policies and admission rules in Python

`lookup_key` is not recorded, because it changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.calls.file_format import Header, header_of, is_ours, text_of
from kvoffload.calls.hint_numbers import HintNumbers
from kvoffload.calls.recorder import CallRecorder
from kvoffload.core.admission import DEFAULT_ADMISSION
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.kernels import call_log
from kvoffload.core.log import ADMITTED, FAILED, IS_PART, Call, Log
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import StorePlan
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES
from kvoffload.core.request import RequestContext
from kvoffload.core.state import Entering
from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.structures.keys import wrong_key

if TYPE_CHECKING:
    from kvoffload.core.policy_change import PolicyChange

RING_WORDS = 1 << 21
"""Capacity of the ring of records: 8 MiB, enough for several seconds of a busy engine."""
_MAY_RAISE = ("touch", "finish_request", "prepare_load", "complete_load", "unpin", "prepare_store",
              "complete_store", "keep", "discard", "expect", "withdraw", "reset")  # fmt: skip


class RecordedManager(OffloadingManager):
    """An `OffloadingManager` that records all calls that affect decisions, for `replay --as-recorded`.

    If a policy or admission rule in Python raises an exception, the record includes the exception's name.

    Args:
        recorder: writes the records. `end_recording` closes the recorder.
        capacity_blocks, and other keywords: as for `OffloadingManager`.

    Attributes:
        recorder: the recording. `recorder.ended` is None while calls are recorded.

    Thread: as `OffloadingManager`; no call waits for the file. bench/call_recording.py measures the cost.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        recorder: CallRecorder,
        tenants: Mapping[str, Quota] | None = None,
        **manager: Any,
    ) -> None:
        super().__init__(capacity_blocks, **manager)
        self._texts = manager.get("policy", DEFAULT_POLICY), manager.get("admission", DEFAULT_ADMISSION)
        self.recorder, self._hint_numbers = recorder, HintNumbers()
        self._log = Log(RING_WORDS, self._header().key_words)
        self._state.exchange("log", self._log)
        recorder.begin(self._log, self._header)
        if tenants:
            self.set_tenants(tenants)
        if not self.store_mode.is_compiled:
            for name in _MAY_RAISE:
                setattr(self, name, self._noting_errors(getattr(self, name), name))

    def _header(self) -> Header:
        return header_of(self, *self._texts)

    def end_recording(self) -> None:
        """Write the recorded calls and the manager's counters, and close the file. Idempotent."""
        self.recorder.close(msgspec.to_builtins(self.counters()))

    # ---- calls without a kernel that records them

    def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> RequestContext:
        """Create the context of a request, see `OffloadingManager.begin_request`."""
        ctx = super().begin_request(request_id, keys, hints=hints)
        if hints is not NO_HINTS:
            self._note_hints(ctx, hints)
        return ctx

    def finish_request(
        self, ctx: RequestContext, path: Sequence[bytes] = (), *, hints: Hints = NO_HINTS
    ) -> None:
        """End a request, see `OffloadingManager.finish_request`."""
        if hints is not NO_HINTS:
            self._note_hints(self._context(ctx), ctx.hints.updated(hints))
        super().finish_request(ctx, path, hints=hints)

    def complete_store(self, plan: StorePlan, success: bool = True) -> None:
        """End a store, see `OffloadingManager.complete_store`."""
        super().complete_store(plan, success)
        if self._void_before <= plan.epoch < self._epoch:  # forgotten by a reset: no kernel has run
            self._note_end(plan)

    def expect(self, ctx: RequestContext) -> None:
        """Register a waiting request, see `OffloadingManager.expect`."""
        ctx = self._context(ctx)
        try:
            super().expect(ctx)
        finally:
            self._note(ctx, Call.EXPECT)

    def withdraw(self, ctx: RequestContext) -> None:
        """Unregister a waiting request, see `OffloadingManager.withdraw`."""
        if self.queue.has(ctx):
            try:
                super().withdraw(ctx)
            finally:
                self._note(ctx, Call.WITHDRAW)

    def contains(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the present blocks, see `OffloadingManager.contains`."""
        present = super().contains(keys, ctx)
        if ctx is not None:
            self._note(ctx, Call.EXTEND)
        return present

    def count_misses(self, ctx: RequestContext, start: int, keys: Sequence[bytes] | None = None) -> int:
        """Count missing blocks, see `OffloadingManager.count_misses`."""
        num_missed = super().count_misses(ctx, start, keys)
        self._note(ctx, Call.EXTEND)
        return num_missed

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget blocks, see `OffloadingManager.discard`."""
        ctx, num_resident = self._context(None), 0
        ctx.add(keys)
        try:
            num_resident = super().discard(keys)
        finally:
            self._note(ctx, Call.DISCARD, len(keys), num_resident)
        return num_resident

    def reset(self, *, drop_in_flight: bool = False) -> None:
        """Forget everything, see `OffloadingManager.reset`."""
        try:
            super().reset(drop_in_flight=drop_in_flight)
        finally:
            self._put(Call.RESET, 0, np.array([drop_in_flight], np.int32))

    def begin_policy_change(self, change: PolicyChange) -> None:
        """Begin to replace the policy, see `OffloadingManager.begin_policy_change`.

        Raises: `ConfigError` for a policy in Python or of another package, while calls are recorded. A replay
        could not reproduce the change.
        """
        text = text_of(POLICIES, change.spec)
        if not (change.handover is not None and is_ours(change.new)) and self._log.is_open:
            why = "while calls are recorded, change only to a policy of kvoffload"
            raise ConfigError("policy", text, why)
        super().begin_policy_change(change)
        self._put(Call.BEGIN_POLICY_CHANGE, 0, _words_of(text.encode()))

    def advance_policy_change(self, num_blocks: int = 256) -> bool:
        """Continue a change of the policy, see `OffloadingManager.advance_policy_change`."""
        if self._change is not None:
            self._put(Call.ADVANCE_POLICY_CHANGE, 0, np.array([num_blocks], np.int32))
        return super().advance_policy_change(num_blocks)

    def begin_resize(self, num_blocks: int) -> None:
        """Begin to change the number of slots, see `OffloadingManager.begin_resize`."""
        super().begin_resize(num_blocks)
        self._put(Call.BEGIN_RESIZE, 0, np.array([num_blocks], np.int32))

    def advance_resize(self, num_blocks: int = 256) -> bool:
        """Continue a resize, see `OffloadingManager.advance_resize`."""
        if self.usable_blocks != self._wanted_blocks:
            self._put(Call.ADVANCE_RESIZE, 0, np.array([num_blocks], np.int32))
        return super().advance_resize(num_blocks)

    def set_tenants(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas, see `OffloadingManager.set_tenants`."""
        super().set_tenants(quotas)
        self._put(Call.TENANTS, 0, _words_of(self._hint_numbers.quotas(self.tenants)))

    # ---- records

    def _note_hints(self, ctx: RequestContext, hints: Hints) -> None:
        number, text = self._hint_numbers.number(hints)
        if text:
            self._put(Call.HINTS, number, _words_of(text))
        self._note(ctx, Call.SET_HINTS, 0, number)

    def _note(self, ctx: RequestContext, kind: int, count: int = 0, result: int = 0) -> None:
        call_log.log_call(self._cache, ctx.memory, kind, count, result)

    def _put(self, kind: int, subject: int, further: npt.NDArray[np.int32]) -> None:
        self._log.put(kind, subject, further)

    def _noting_errors(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a method to record its exceptions, except `MisuseError`, which changes nothing."""

        @functools.wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            num_calls = self._log.num_calls
            try:
                return method(*arguments, **keywords)
            except Exception as error:
                if isinstance(error, MisuseError):
                    raise
                if self._log.num_calls == num_calls and name == "prepare_store":
                    self._note_offer(*arguments, **keywords)
                if self._log.num_calls == num_calls and name == "complete_store":
                    self._note_end(*arguments, **keywords)
                if self._log.num_calls > num_calls:
                    self._put(Call.RAISED, 0, _words_of(type(error).__name__.encode()))
                raise

        return call

    def _note_offer(
        self, keys: Sequence[bytes], ctx: RequestContext | None = None, *, admitted: bool = False
    ) -> None:
        """Record a `prepare_store` that raised before its kernel recorded the call.

        Skips calls with invalid keys.
        """
        if wrong_key(keys, self.key_bytes) is None:
            ctx = self._context(ctx)
            ctx.add(keys)
            self._note(ctx, Call.PREPARE_STORE | FAILED | ADMITTED * admitted, len(keys))

    def _note_end(self, plan: StorePlan, success: bool = False) -> None:
        """Record a `complete_store` that no kernel has recorded, because of an exception or a reset."""
        number = Entering.over(plan.memory).number
        of_part = plan.slots if number < 0 else plan.slots[:0]
        result = np.int32(success + IS_PART * (number < 0))
        self._put(Call.COMPLETE_STORE, abs(number), np.append(result, of_part))


def _words_of(text: bytes) -> npt.NDArray[np.int32]:
    """Pad a text with zero bytes to whole words."""
    return np.frombuffer(text + bytes(-len(text) % 4), np.int32)
