"""Source: vLLM's KV events, which report blocks that the GPU cache stored or removed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvoffload.settings.read import Positive
from kvoffload.traces.conversion.event_stream import batches, is_address
from kvoffload.traces.conversion.source import Given, Request, Source
from kvoffload.traces.lines import BadLineError, decoded

_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_decode = msgspec.json.Decoder().decode


@dataclass
class _Open:
    """An inferred request that may still store more blocks."""

    begun_s: float
    last_s: float
    chain: dict[Any, None]
    num_prompt: int
    is_over: bool = False


class KVEvents(Source):
    """Batches in vLLM's encoding, as JSON lines or live from vLLM's publisher (``tcp://host:port``).

    Events do not name requests, so requests are inferred. Consecutive blocks of a chain that are stored at
    most `gap_s` seconds apart form one request. The blocks before them in the chain are the cached prefix of
    its prompt. The first batch of a request stores prompt blocks; if a later batch stores a single block, the
    block counts as generated. A request that computed no whole block leaves no event. Because the trace lacks
    such requests, it has less reuse than the engine had. Only events of the GPU's cache and of the first KV
    cache group count.

    Memory: proportional to the blocks in the GPU's cache.
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
        return {"ts", "events"} <= names

    @property
    def assumed(self) -> str:
        """The gap `gap_s` that separates requests."""
        return f"gap-{self.gap_s:g}s"

    def records(
        self, place: str, progress: Callable[[float], None] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        return batches(place, self._lost) if is_address(place) else super().records(place, progress)

    def read(self, record: bytes) -> Iterable[Request]:
        batch = decoded(_decode, record)
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")]
        time_s, events, rank = (*batch, None, None)[:3] if isinstance(batch, list) else (None,) * 3
        if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not isinstance(events, list):
            raise BadLineError("line: not a batch of KV events: [seconds, [event, ...]]")
        counted = [(kind, event) for kind, event in map(_event, events) if self._counts(kind, event)]
        self._check_chains(time_s - self.gap_s, rank, counted)
        self._close_before(time_s - self.gap_s)
        for kind, event in counted:
            if kind == "AllBlocksCleared":
                self._parents = {key: parent for key, parent in self._parents.items() if key[0] != rank}
            elif kind == "BlockStored":
                self._store(float(time_s), rank, event["block_hashes"], event.get("parent_block_hash"))
            else:
                for block_hash in event["block_hashes"]:
                    self._parents.pop((rank, block_hash), None)
        return self._ended()

    def rest(self) -> Iterable[Request]:
        self._close_before(float("inf"))
        return self._ended()

    def remarks(self) -> list[str]:
        """Report the requests and batches that are missing in the recording."""
        remarks = ["requests that computed no whole block leave no KV events: the engine had more reuse"]
        if self._num_unknown:
            remarks.append(
                f"{self._num_unknown:,} requests continue blocks from before the recording (one block each)"
            )
        if self._lost[0]:
            remarks.append(f"{self._lost[0]:,} batches were lost in transit")
        return remarks

    def _counts(self, kind: str, event: dict[str, Any]) -> bool:
        """Return True if the event clears all blocks, or concerns the GPU's cache and the first KV group.

        Raises `BadLineError` if the size of stored blocks is not the block size of the trace.
        """
        if kind == "AllBlocksCleared":
            return True
        if event.get("medium") not in (None, "GPU") or event.get("group_idx") not in (None, 0):
            return False
        size, tokens = event.get("block_size"), self.given.block_size.tokens
        if kind == "BlockStored" and size != tokens:
            raise BadLineError(f"field block_size: {size}, not {tokens}; --block-tokens {size} would fit")
        return kind in ("BlockStored", "BlockRemoved") and bool(event["block_hashes"])

    def _check_chains(
        self, closed_before_s: float, rank: Any, events: list[tuple[str, dict[str, Any]]]
    ) -> None:
        """Raise `BadLineError` if an event of the batch would make a block its own ancestor.

        Called before the first event of the batch is applied, so that a bad batch changes nothing. Blocks
        that the batch removes still count as ancestors.
        """
        parents: dict[Any, Any] = {}
        # The chains of open requests by last block, in segments; None: the request has other blocks by now.
        chains: dict[Any, list[dict[Any, None]] | None] = {}
        for hashes, parent in (
            (event["block_hashes"], event.get("parent_block_hash"))
            for kind, event in events
            if kind == "BlockStored"
        ):
            segments = chains.get(parent)
            if parent not in chains and (request := self._open.get((rank, parent))) is not None:
                segments = [request.chain] if request.last_s >= closed_before_s else None
            if segments is None:
                segments = [self._path(rank, parent, parents)[0]]
            for block_hash in hashes:
                if any(block_hash in segment for segment in segments):
                    raise BadLineError(f"field events: block {block_hash} is its own ancestor")
            parents |= zip(hashes, [parent, *hashes], strict=False)
            chains |= {parent: None, hashes[-1]: [*segments, dict.fromkeys(hashes)]}

    def _store(self, time_s: float, rank: Any, hashes: list[Any], parent: Any) -> None:
        request = self._open.get((rank, parent)) if parent is not None else None
        chain = self._ancestors(rank, parent) if request is None else request.chain
        chain |= dict.fromkeys(hashes)
        if request is None:
            request = _Open(time_s, time_s, chain, len(chain))
            self._in_order.append(request)
        else:
            del self._open[rank, parent]
            request.last_s = time_s
            if len(hashes) > 1:
                request.num_prompt = len(request.chain)
        for block_hash in hashes:
            self._parents[rank, block_hash] = parent
            parent = block_hash
        # An equal prompt may have stored the same last block: vLLM computes the last block of each prompt.
        if (earlier := self._open.pop((rank, hashes[-1]), None)) is not None:
            earlier.is_over = True
        self._open[rank, hashes[-1]] = request

    def _ancestors(self, rank: Any, block_hash: Any) -> dict[Any, None]:
        """Return the chain of blocks from the first block of the prompt to this block."""
        path, is_known = self._path(rank, block_hash, {})
        self._num_unknown += not is_known
        return dict.fromkeys(reversed(path))

    def _path(self, rank: Any, block_hash: Any, newer: dict[Any, Any]) -> tuple[dict[Any, None], bool]:
        """Return this block and its ancestors, last block first. Also return True if all ancestors are known.

        The parents in `newer` replace recorded parents. Raises `BadLineError` if a block is its own ancestor.
        """
        path: dict[Any, None] = {}
        while block_hash is not None:
            if block_hash in path:
                raise BadLineError(f"field events: block {block_hash} is its own ancestor")
            path[block_hash] = None
            if block_hash in newer:
                block_hash = newer[block_hash]
            elif (rank, block_hash) in self._parents:
                block_hash = self._parents[rank, block_hash]
            else:
                return path, False
        return path, True

    def _close_before(self, time_s: float) -> None:
        while self._open:
            key, request = next(iter(self._open.items()))
            if request.last_s >= time_s:
                break
            request.is_over = True
            del self._open[key]

    def _ended(self) -> list[Request]:
        """Remove and return the requests that have ended, in order of arrival, up to the first open one."""
        size, ended = self.given.block_size.tokens, []
        while self._in_order and self._in_order[0].is_over:
            request = self._in_order.popleft()
            num_prompt, num_all = request.num_prompt, len(request.chain)
            ids = self.given.keys.of([*request.chain][:num_prompt])
            ended.append(Request(request.begun_s, num_prompt * size, (num_all - num_prompt) * size, ids))
        return ended


def _event(event: Any) -> tuple[str, dict[str, Any]]:
    """Return the kind and the fields of an event, which is an object, or in older vLLM an array.

    Raises: `BadLineError` if the event is invalid.
    """
    if isinstance(event, list) and event and isinstance(event[0], str):
        names = _FIELDS if event[0] == "BlockStored" else ("block_hashes", "medium")
        event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadLineError("field events: an element is not an event")
    if event["type"] in ("BlockStored", "BlockRemoved") and not (
        isinstance(event.get("block_hashes"), list)
        and all(isinstance(block_hash, (int, str)) for block_hash in event["block_hashes"])
        and isinstance(event.get("parent_block_hash"), (int, str, type(None)))
    ):
        raise BadLineError("field events: a block has no hash")
    if event["type"] == "BlockStored" and len(set(event["block_hashes"])) < len(event["block_hashes"]):
        raise BadLineError("field events: a block is stored twice")
    return event["type"], event
