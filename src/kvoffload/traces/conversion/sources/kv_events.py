"""vLLM's KV events: what its GPU cache stored and dropped. Requests are inferred from them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvoffload.settings.read import Positive
from kvoffload.traces.conversion.live import batches, is_address
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.lines import BadLineError, decoded

_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_decode = msgspec.json.Decoder().decode


@dataclass
class _Open:
    """A request that may still store blocks."""

    begun_s: float
    last_s: float
    chain: list[Any]
    num_prompt: int
    is_over: bool = False


class KVEvents(Source):
    """Batches as vLLM encodes them, each as JSON on a line, or live from its publisher (``tcp://host:port``).

    Blocks that follow each other within `gap_s` are one request; those that come one at a time after its
    first were generated. What the GPU had of a prompt follows from what the blocks stand on. *Unseen* is a
    request that computed no whole block: hits are more than this says. Events of other caches than the
    GPU's, and of KV groups after the first, are left out.

    Memory: the blocks that the GPU's cache holds.
    """

    name = "kv_events"
    block_tokens: ClassVar[int | None] = 16
    gap_s: Positive = 2.0

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._parents: dict[tuple[Any, Any], Any] = {}
        self._open: OrderedDict[tuple[Any, Any], _Open] = OrderedDict()
        self._in_order: deque[_Open] = deque()
        self._num_unknown = 0
        self._lost: list[int] = [0]

    @classmethod
    def recognises(cls, names: frozenset[str]) -> bool:
        """By a batch's time and events."""
        return {"ts", "events"} <= names

    @property
    def assumed(self) -> str:
        """That requests are what comes without a gap."""
        return f"gap-{self.gap_s:g}s"

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The lines, or what a publisher sends until it is interrupted."""
        return batches(place, self._lost) if is_address(place) else super().records(place, progress)

    def read(self, record: bytes) -> Iterable[Request]:
        """The requests that were over before this batch."""
        batch = decoded(_decode, record)
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")]
        time_s, events, rank = (*batch, None, None)[:3] if isinstance(batch, list) else (None,) * 3
        if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not isinstance(events, list):
            raise BadLineError("line: no batch of KV events: [seconds, [event, ...]]")
        found = [one for one in map(_event, events) if self._counts(*one)]
        self._close_before(time_s - self.gap_s)
        for kind, event in found:
            if kind == "AllBlocksCleared":
                self._parents = {key: parent for key, parent in self._parents.items() if key[0] != rank}
            elif kind == "BlockStored":
                self._store(float(time_s), rank, event["block_hashes"], event.get("parent_block_hash"))
            else:
                for one in event["block_hashes"]:
                    self._parents.pop((rank, one), None)
        return self._take()

    def rest(self) -> Iterable[Request]:
        """Requests that were running at the end."""
        self._close_before(float("inf"))
        return self._take()

    def remarks(self) -> list[str]:
        """What the recording has not seen."""
        said = ["requests that computed no whole block are not in KV events: there was more reuse than this"]
        if self._num_unknown:
            said.append(
                f"{self._num_unknown:,} requests stand on blocks from before the recording: one block for all"
            )
        if self._lost[0]:
            said.append(f"{self._lost[0]:,} batches were lost on their way")
        return said

    def _counts(self, kind: str, event: dict[str, Any]) -> bool:
        """Whether an event is of the cache that is followed; `BadLineError` for blocks of another size."""
        if kind == "AllBlocksCleared":
            return True
        if event.get("medium") not in (None, "GPU") or event.get("group_idx") not in (None, 0):
            return False
        size, tokens = event.get("block_size"), self.given.block_size.tokens
        if kind == "BlockStored" and size != tokens:
            raise BadLineError(f"field block_size: {size}, not {tokens}; --block-tokens {size} would fit")
        return kind in ("BlockStored", "BlockRemoved") and bool(event["block_hashes"])

    def _store(self, time_s: float, rank: Any, hashes: list[Any], parent: Any) -> None:
        going_on = self._open.pop((rank, parent), None) if parent is not None else None
        if going_on is None:
            chain = self._ancestors(rank, parent) + hashes
            going_on = _Open(time_s, time_s, chain, len(chain))
            self._in_order.append(going_on)
        else:
            going_on.chain += hashes
            going_on.last_s = time_s
            if len(hashes) > 1:
                going_on.num_prompt = len(going_on.chain)
        for one in hashes:
            self._parents[rank, one] = parent
            parent = one
        self._open[rank, hashes[-1]] = going_on

    def _ancestors(self, rank: Any, one: Any) -> list[Any]:
        chain: list[Any] = []
        while one is not None:
            chain.append(one)
            if (rank, one) not in self._parents:
                self._num_unknown += 1
                break
            one = self._parents[rank, one]
        return chain[::-1]

    def _close_before(self, time_s: float) -> None:
        while self._open:
            key, request = next(iter(self._open.items()))
            if request.last_s >= time_s:
                break
            request.is_over = True
            del self._open[key]

    def _take(self) -> list[Request]:
        """The requests that are over, up to the first one that is not: in the order of their beginnings."""
        size, taken = self.given.block_size.tokens, []
        while self._in_order and self._in_order[0].is_over:
            request = self._in_order.popleft()
            num_prompt, num_all = request.num_prompt, len(request.chain)
            ids = self.given.keys.of(request.chain[:num_prompt])
            taken.append(Request(request.begun_s, num_prompt * size, (num_all - num_prompt) * size, ids))
        return taken


def _event(event: Any) -> tuple[str, dict[str, Any]]:
    """Kind and fields of an event: an object, or an array in older versions. Raises `BadLineError`."""
    if isinstance(event, list) and event and isinstance(event[0], str):
        names = _FIELDS if event[0] == "BlockStored" else ("block_hashes", "medium")
        event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadLineError("field events: one is no event")
    if event["type"] in ("BlockStored", "BlockRemoved") and not (
        isinstance(event.get("block_hashes"), list)
        and all(isinstance(one, (int, str)) for one in event["block_hashes"])
        and isinstance(event.get("parent_block_hash"), (int, str, type(None)))
    ):
        raise BadLineError("field events: a block has no hash")
    return event["type"], event
