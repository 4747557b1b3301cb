"""The replay of recorded calls on a new manager.

The new manager must make the same decisions as the recorded manager.

Owns the translation of records into calls, and the comparison. The first difference ends a replay, because
later calls may refer to blocks that only one of the two managers has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.calls.explain import Difference, block_states, result_of
from kvoffload.calls.file_format import CLOSED, CONTINUED, FrameReader, Header
from kvoffload.calls.hint_numbers import MOST_HINTS, hints_of, quotas_of
from kvoffload.calls.reading import DamagedError, Record, read_records
from kvoffload.calls.state import StateError, decode
from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.kernels.offers import NO_ROOM
from kvoffload.core.kernels.victims import FIRST_WRONG
from kvoffload.core.log import ADMITTED, FAILED, IS_PART, Call
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, LookupResult, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, MisuseError, PolicyError, TraceError
from kvoffload.structures.jit import U64Matrix
from kvoffload.structures.keys import Keys

_KEPT_CALLS = 20
_STATE = ("manager", "_requests", "_plans", "_num_plans", "_hints", "_damaged")
"""Attributes of `CallReplay` that carry over from one part of a recording to the next."""
_NO_ROWS = np.empty(0, np.int32)


@dataclass
class _Request:
    """A request of the replay, its path and its latest calls."""

    ctx: RequestContext
    words: U64Matrix
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))
    path_at_end: Sequence[bytes] = ()
    hints_at_end: Hints = NO_HINTS


@dataclass
class _OpenPlan:
    """A plan in progress, with the number of its blocks that are not yet completed."""

    plan: LoadPlan | StorePlan
    num_open: int


class _Result(NamedTuple):
    """The result of a call, in the form of `Record.further`, and the plan that the call returned."""

    words: list[int]
    plan: LoadPlan | StorePlan | None = None

    @classmethod
    def of_load(cls, plan: LoadPlan) -> _Result:
        return cls(plan.slots.tolist(), plan)


@dataclass
class Outcome:
    """The result of a replay.

    Attributes:
        header: the recorded configuration.
        calls: number of replayed calls by kind.
        difference: the first difference; None if all decisions are equal.
        end: reason of the recording's end; empty if the end mark is missing.
        num_cut: number of ignored bytes after the last whole frame.
        warnings: sentences for the user.
        num_parts: number of replayed files.
    """

    header: Header
    calls: Counter[str] = field(default_factory=Counter)
    difference: Difference | None = None
    end: str = ""
    num_cut: int = 0
    warnings: list[str] = field(default_factory=list)
    num_parts: int = 1

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())


def manager_of(header: Header) -> OffloadingManager:
    """Create the manager of a replay. Raises `ConfigError`, for example if a policy cannot be imported."""
    manager = OffloadingManager(
        header.capacity_blocks,
        key_bytes=header.key_bytes if header.key_words else 8,
        policy=header.policy,
        admission=header.admission,
        store=header.store,
    )
    if not header.refuses_unasked:
        manager.refuse_only_if_asked()
    return manager


def _decoded(state: bytes, reader: FrameReader) -> dict[str, Any]:
    try:
        decoded = decode(state)
        if decoded.keys() != {*_STATE}:
            raise StateError(f"it has {sorted(decoded)}, not {sorted(_STATE)}")
    except StateError as error:
        raise TraceError(
            f"{reader.path}: the state at the beginning, written by kvoffload {reader.header.kvoffload}, "
            f"cannot be read by {__version__}: {error}"
        ) from None
    return decoded


class CallReplay:
    """Feeds the calls of a recording to a manager and compares each result.

    Args:
        reader: the recording, or a part of the recording.
        manager: a new manager; by default with the recorded configuration.
        before: the replay of the previous part, which provides the state if the recorded part has no state.

    Raises: `TraceError` for a part whose state is missing or cannot be read.
    """

    def __init__(
        self,
        reader: FrameReader,
        manager: OffloadingManager | None = None,
        before: CallReplay | None = None,
    ) -> None:
        self._reader = reader
        self.manager: OffloadingManager
        self._requests: dict[int, _Request]
        self._plans: dict[int, _OpenPlan]
        self._num_plans: int
        self._hints: dict[int, Hints]
        self._damaged: npt.NDArray[np.int32]
        if reader.state is not None:
            vars(self).update(_decoded(reader.state, reader))
        elif reader.header.part == 1:
            manager = manager_of(reader.header) if manager is None else manager
            vars(self).update(zip(_STATE, (manager, {}, {}, 0, {}, _NO_ROWS), strict=True))
        elif before is not None and before.is_followed_by(reader):
            vars(self).update(before.state())
        else:
            why = "it has no state at the beginning; give the name of the first part, to replay all parts"
            raise TraceError(f"{reader.path}: {why}")

    def state(self) -> dict[str, Any]:
        """Return the state at the beginning of the next part, for `calls.state.encode`."""
        return {name: getattr(self, name) for name in _STATE}

    def is_followed_by(self, reader: FrameReader) -> bool:
        """Return True if all calls of this part were replayed, and `reader` reads the next part."""
        end = self._reader.end
        is_whole = end is not None and end.reason == CONTINUED
        return is_whole and reader.header.part == self._reader.header.part + 1

    def run(self, progress: Callable[[float], None] = lambda done: None) -> Outcome:
        """Replay all calls, or the calls up to the first difference.

        `progress` receives the number of bytes that have been read.
        """
        outcome = Outcome(self._reader.header)
        if outcome.header.kvoffload != __version__:
            outcome.warnings.append(
                f"recorded by kvoffload {outcome.header.kvoffload}, replayed by {__version__}: decisions "
                f"may differ"
            )
        try:
            for record, raised in _calls(read_records(self._reader)):
                if record.call > Call.RESET:
                    self._take_note(record)
                    continue
                outcome.calls[record.call.name.lower()] += 1
                outcome.difference = self._replay(record, raised)
                if outcome.difference is not None:
                    break
                if record.number % 1024 == 0:
                    progress(self._reader.num_read)
        except DamagedError as error:
            outcome.warnings.append(f"the recording is damaged: {error}")
        self._finish(outcome)
        if outcome.difference is not None:
            outcome.difference.recording = self._reader.path.name
        return outcome

    def _finish(self, outcome: Outcome) -> None:
        end, outcome.num_cut = self._reader.end, self._reader.num_cut
        if end is None or outcome.difference is not None:
            return
        outcome.end = end.reason
        counters = msgspec.to_builtins(self.manager.counters())
        if end.reason == CLOSED and counters != end.counters:
            outcome.difference = Difference(
                outcome.num_calls, "the counters at the end", 0, 0, end.counters, counters
            )

    def _take_note(self, record: Record) -> None:
        if record.call is Call.HINTS:
            try:
                self._hints[record.subject] = hints_of(record.further.tobytes())
                self._hints.pop(record.subject - MOST_HINTS, None)  # no later call has this number
            except msgspec.MsgspecError as error:
                raise DamagedError(f"call {record.number}: invalid hints: {error}") from None
        elif record.call is Call.TENANTS:
            try:
                self.manager.set_tenants(quotas_of(record.further.tobytes()))
            except (msgspec.MsgspecError, ConfigError) as error:
                raise DamagedError(f"call {record.number}: invalid quotas: {error}") from None
        elif record.call is Call.DAMAGED:
            self._damaged = record.further
        elif record.call is Call.SET_HINTS:
            self._set_hints(record, self._hints.get(int(record.further[0]), NO_HINTS))
        elif record.call is Call.BEGIN_POLICY_CHANGE:
            policy = record.further.tobytes().rstrip(b"\0").decode()
            self.manager.begin_policy_change(self.manager.prepare_policy_change(policy))
        elif record.call is Call.ADVANCE_POLICY_CHANGE:
            self.manager.advance_policy_change(int(record.further[0]))
        elif record.call is Call.BEGIN_RESIZE:
            try:
                self.manager.begin_resize(int(record.further[0]))
            except ConfigError as error:
                raise DamagedError(f"call {record.number}: invalid size: {error}") from None
        elif record.call is Call.ADVANCE_RESIZE:
            self.manager.advance_resize(int(record.further[0]))

    def _set_hints(self, record: Record, hints: Hints) -> None:
        request = self._requests.get(record.subject)
        if request is None:
            self._begin(record, hints)
        else:
            self._extend(record, request)
            request.hints_at_end = hints

    # ---- one call

    def _replay(self, record: Record, raised: str) -> Difference | None:
        request = self._request(record)
        keys = self._batch(record, request)
        expected = [] if record.flags & FAILED else record.further.tolist()
        error, result = "", _Result([])
        try:
            result = _CALLS[record.call](self, record, request, keys) or _Result([0])
        except PolicyError:
            # A kernel has recorded the row of the wrong victim. A policy in Python does not report the row.
            error = raised if expected and expected[0] <= FIRST_WRONG else PolicyError.__name__
            result = _Result(expected)
        except MisuseError as misuse:
            is_recorded = record.call in (Call.PREPARE_LOAD, Call.PIN) and min(expected, default=0) < 0
            error, result = "" if is_recorded else type(misuse).__name__, _Result(expected)
        except Exception as problem:
            error = type(problem).__name__
        if record.call in _MAKE_PLANS and (record.call is not Call.PREPARE_STORE or expected[:1] >= [0]):
            self._num_plans += min(expected, default=0) >= 0
            if result.plan is not None:
                self._plans[self._num_plans] = _OpenPlan(result.plan, len(result.plan))
        is_equal = error == raised and (bool(error) or result.words == expected)
        if is_equal:
            self._note(record, request, keys)
            return None
        return self._difference(record, request, keys, _Results(raised, expected, error, result))

    def _note(self, record: Record, request: _Request, keys: Keys) -> None:
        """Remember the call as one of the request's latest calls, which a later difference shows. Forget a
        finished request.
        """
        request.calls.append(f"{record.number} {record.call.name.lower()}, {len(keys)} blocks")
        if record.call is Call.FINISH:
            del self._requests[record.subject]

    def _difference(self, record: Record, request: _Request, keys: Keys, results: _Results) -> Difference:
        def named(words: list[int]) -> dict[str, Any]:
            return result_of(record.call, words, self.manager, results.result.plan)

        return Difference(
            record.number,
            record.call.name.lower(),
            record.subject,
            record.time_ns,
            {"raised": results.raised} if results.raised else named(results.expected),
            {"raised": results.error} if results.error else named(results.result.words),
            block_states(self.manager, keys),
            [*request.calls],
        )

    def _begin(self, record: Record, hints: Hints = NO_HINTS) -> _Request:
        keys = Keys(record.new_keys, self.manager.key_bytes)
        ctx = self.manager.begin_request(f"request {record.subject}", keys, hints=hints)
        request = _Request(ctx, record.new_keys)
        if record.subject:
            self._requests[record.subject] = request
        return request

    def _extend(self, record: Record, request: _Request) -> None:
        if len(record.new_keys):
            request.ctx.add(Keys(record.new_keys, self.manager.key_bytes))
            request.words = np.concatenate([request.words, record.new_keys])

    def _request(self, record: Record) -> _Request:
        """Return the request to which a record belongs, after appending the record's new keys to the
        request's path.

        The first record of a request begins the request. Records that end a plan and records without a
        request get a new request of their own.
        """
        if record.call in _ENDS:
            return _Request(self.manager.begin_request(""), record.new_keys)
        request = self._requests.get(record.subject)
        if request is None:
            return self._begin(record)
        self._extend(record, request)
        return request

    def _batch(self, record: Record, request: _Request) -> Keys:
        starts, lengths = record.runs[::2], record.runs[1::2]
        parts = [request.words[at : at + length] for at, length in zip(starts, lengths, strict=True)]
        words = parts[0] if len(parts) == 1 else np.concatenate([request.words[:0], *parts])
        return Keys(np.ascontiguousarray(words), self.manager.key_bytes)

    def _end_plan(self, record: Record, request: _Request, keys: Keys) -> _Result:
        slots, is_part = record.further[1:], bool(record.further[0] & IS_PART)
        if is_part and not len(slots):
            return _Result(record.further.tolist())  # an empty part; its plan may have ended
        opened = self._plans[record.subject]
        damaged, self._damaged = self._damaged, _NO_ROWS
        plan = opened.plan
        opened.num_open -= len(slots) if is_part else len(plan)
        if opened.num_open <= 0:
            del self._plans[record.subject]
        if is_part:
            order = np.argsort(plan.slots, kind="stable")
            rows = order[np.searchsorted(plan.slots, slots, sorter=order)]
            plan, opened.plan = plan.split([rows, np.setdiff1d(np.arange(len(plan)), rows)])
        if isinstance(plan, StorePlan):
            self.manager.complete_store(plan, success=bool(record.further[0] & 1))
        elif record.call is Call.UNPIN:
            self.manager.unpin(plan, damaged)
        else:
            self.manager.complete_load(plan, damaged)
        return _Result(record.further.tolist())

    def _lookup(self, record: Record, request: _Request, keys: Keys) -> _Result:
        num_ready, stopped_by = self.manager.lookup(keys, request.ctx)
        return _Result([~num_ready if stopped_by is LookupResult.HIT_PENDING else num_ready])

    def _keep_path(self, record: Record, request: _Request, keys: Keys) -> None:
        request.path_at_end = keys

    def _prepare_store(self, record: Record, request: _Request, keys: Keys) -> _Result:
        plan = self.manager.prepare_store(keys, request.ctx, admitted=bool(record.flags & ADMITTED))
        if plan is None:
            return _Result([NO_ROOM])
        missing = plan.missing_rows
        numbers = [len(plan), len(missing), plan.num_dropped, plan.num_refused, len(plan) - plan.num_evicted]
        return _Result([*numbers, *plan.slots.tolist(), *_runs_of(missing)], plan)

    def _reset(self, record: Record, request: _Request, keys: Keys) -> _Result:
        self.manager.reset(drop_in_flight=bool(record.further[0]))
        if record.further[0]:
            self._plans.clear()  # the ends of these plans are not recorded
        return _Result(record.further.tolist())


class _Results(NamedTuple):
    """Exceptions and results of one call: `raised` and `expected` in the recording, `error` and `result` in
    the replay.
    """

    raised: str
    expected: list[int]
    error: str
    result: _Result


_ENDS = (Call.COMPLETE_LOAD, Call.UNPIN, Call.COMPLETE_STORE)
_MAKE_PLANS = (Call.PREPARE_LOAD, Call.PIN, Call.PREPARE_STORE)
_CALLS: dict[Call, Callable[[CallReplay, Record, _Request, Keys], _Result | None]] = {
    Call.EXTEND: lambda replay, record, request, keys: None,
    Call.EXPECT: lambda replay, record, request, keys: replay.manager.expect(request.ctx),
    Call.WITHDRAW: lambda replay, record, request, keys: replay.manager.withdraw(request.ctx),
    Call.LOOKUP: CallReplay._lookup,
    Call.TOUCH: lambda replay, record, request, keys: replay.manager.touch(keys, request.ctx),
    Call.TOUCH_PATH: CallReplay._keep_path,
    Call.FINISH: lambda replay, record, request, keys: replay.manager.finish_request(
        request.ctx, request.path_at_end, hints=request.hints_at_end
    ),
    Call.PREPARE_LOAD: lambda replay, record, request, keys: _Result.of_load(
        replay.manager.prepare_load(keys, request.ctx)
    ),
    Call.PIN: lambda replay, record, request, keys: _Result.of_load(replay.manager.pin(keys)),
    Call.PREPARE_STORE: CallReplay._prepare_store,
    Call.KEEP: lambda replay, record, request, keys: _Result([replay.manager.keep(keys)]),
    Call.DISCARD: lambda replay, record, request, keys: _Result([replay.manager.discard(keys)]),
    Call.RESET: CallReplay._reset,
    **dict.fromkeys(_ENDS, CallReplay._end_plan),
}
"""Mapping: kind of a call -> function that replays the call. A function returns None for a call without a
result; the recorded result of such a call is a single 0."""


def _calls(records: Iterator[Record]) -> Iterator[tuple[Record, str]]:
    """Yield each record with the name of the exception that its call raised, or "" if there was none."""
    previous: Record | None = None
    for record in records:
        is_error = record.call is Call.RAISED
        if previous is not None:
            yield previous, record.further.tobytes().rstrip(b"\0").decode() if is_error else ""
        previous = None if is_error else record
    if previous is not None:
        yield previous, ""


def _runs_of(rows: npt.NDArray[np.int32]) -> list[int]:
    """Convert ascending numbers to runs of consecutive numbers: start and length of each run."""
    if not len(rows):
        return []
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    lengths = np.diff(starts, append=len(rows))
    return np.stack([rows[starts], lengths], axis=1).ravel().tolist()  # type: ignore[no-any-return]
