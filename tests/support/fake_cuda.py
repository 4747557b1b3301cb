"""A fake CUDA runtime in host memory, with lagging streams, a pending error and pinned ranges.

`installed` replaces ``torch.cuda`` by the fake. Tensors of `FakeCuda.tensor` are on a device: copies and
kernels on them wait in their stream until a caller waits for the stream. As with CUDA, a copy with
`non_blocking` is asynchronous if its host memory is pinned, and an error if a part of that memory is pinned.
Other copies block the host.

The fake has no timing, and no behaviour of real drivers beyond these rules.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kvoffload.transfer import pinned

PAGE = mmap.PAGESIZE
SUCCESS, INVALID_VALUE, NO_MEMORY, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = (
    0,
    1,
    2,
    700,
    712,
    713,
)
EARLY, LATE = "early", "late"


class DeviceTensor(torch.Tensor):
    """Bytes of the fake device, in host memory. Only the fake's streams move them."""

    index = 0

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:
        return True

    def record_stream(self, stream: Any) -> None:
        """Do nothing: the fake never reuses memory."""


class Event:
    """A point in a stream."""

    def __init__(self, cuda: FakeCuda, blocking: bool) -> None:
        self.cuda, self.blocking, self.stream, self.passed = cuda, blocking, None, True

    def record(self, stream: Any = None) -> None:
        self.stream, self.passed = stream or self.cuda.current_stream(), False
        self.stream.submit(lambda: setattr(self, "passed", True))

    def query(self) -> bool:
        self.cuda.check()
        self.cuda.progress()
        return self.passed

    def synchronize(self) -> None:
        self.cuda.check()
        if not self.blocking:
            self.cuda.spins += 1
        while not self.passed:
            self.stream.run_one()


class Stream:
    """A queue of work; an entry may wait for events of other streams."""

    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda, self.index, self.queue = cuda, index, deque[Callable[[], None]]()
        cuda.streams.append(self)

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.index)

    def submit(self, act: Callable[[], None]) -> None:
        self.queue.append(act)
        self.cuda.progress()

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.cuda, blocking=True)
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        def wait() -> None:
            while not event.passed:
                event.stream.run_one()

        self.submit(wait)

    def run_one(self) -> None:
        self.queue.popleft()()

    def synchronize(self) -> None:
        self.cuda.check()
        while self.queue:
            self.run_one()


class FakeCuda:
    """The fake runtime, which replaces `torch.cuda` while installed.

    Attributes:
        order: `EARLY` runs work on submission, `LATE` when a caller waits; a number seeds a random order.
        current: the current device.
        contexts: devices on which calls have created a context.
        registered: memory pinned by `cudaHostRegister`, address to end.
        pinned: memory of torch's pinned allocator, address to end.
        last_error: the pending error, until `cudaGetLastError` or the check after a launch.
        broken: a permanent error.
        pin_limit: total bytes that can be pinned.
        can_map: whether pinned host memory has the same address on devices.
        copies_foreign: whether torch copies host memory that was pinned for another device, as older
            versions do.
        host_waits: number of copies that blocked the host.
        spins: number of waits for events that spin.
    """

    def __init__(
        self,
        order: str | int = LATE,
        *,
        pin_limit: int = 1 << 40,
        has_last_error: bool = True,
        can_map: bool = True,
        copies_foreign: bool = False,
    ) -> None:
        self.order, self.pin_limit, self.can_map = order, pin_limit, can_map
        self.copies_foreign = copies_foreign
        self.rng = random.Random(order) if isinstance(order, int) else None
        self.streams: list[Stream] = []
        self.current, self.contexts = 0, set[int]()
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.last_error = self.broken = SUCCESS
        self.host_waits = self.launches = self.spins = 0
        self._kept: list[Any] = []
        self._owners: dict[int, int] = {}
        self._mapped: list[tuple[int, int]] = []
        self._defaults: dict[int, Stream] = {}
        self._stack: list[Stream] = []
        self.runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        self.library = SimpleNamespace(
            cudaGetLastError=self.take_last_error, cudaHostGetDevicePointer=self.device_pointer
        )
        if has_last_error:
            self.runtime.cudaGetLastError = self.take_last_error

    def tensor(self, host: torch.Tensor, index: int = 0) -> Any:
        """Create a device tensor with these bytes."""
        return host.clone().as_subclass(type("DeviceTensor", (DeviceTensor,), {"index": index}))

    def bytes_of(self, tensor: torch.Tensor) -> Any:
        """Return the current bytes of a device tensor."""
        return tensor.as_subclass(torch.Tensor)

    # ---- as torch.cuda

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802
        index = self.current if device is None else torch.device(device).index
        self.contexts.add(index)
        return Stream(self, index)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:  # noqa: N802
        return Event(self, blocking)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.current if device is None else torch.device(device).index
        if self._stack and self._stack[-1].index == index:
            return self._stack[-1]
        if index not in self._defaults:
            self._defaults[index] = Stream(self, index)
        return self._defaults[index]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self.device(stream.device):
            self._stack.append(stream)
            try:
                yield
            finally:
                self._stack.pop()

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        self.check()
        index = self.current if device is None else torch.device(device).index
        for stream in self.streams:
            if stream.index == index:
                stream.synchronize()

    def is_available(self) -> bool:
        return True

    def cudart(self) -> Any:
        return self.runtime

    # ---- the runtime

    def take_last_error(self) -> int:
        error, self.last_error = self.last_error, self.broken
        return error

    def launch(self) -> None:
        """Launch an unrelated kernel, whose check raises any pending error."""
        self.launches += 1
        if error := self.take_last_error():
            raise RuntimeError(f"CUDA error: {error}")

    def check(self) -> None:
        if self.broken:
            raise RuntimeError(f"CUDA error: {self.broken}")

    def break_device(self) -> None:
        """Make all further calls fail, as after an illegal address in a kernel."""
        self.broken = self.last_error = ILLEGAL_ADDRESS
        for stream in self.streams:
            stream.queue.clear()

    def _failed(self, error: int) -> int:
        if error:
            self.last_error = error
        return error

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.contexts.add(self.current)
        first, end = address // PAGE * PAGE, -(-(address + num_bytes) // PAGE) * PAGE
        if self.broken:
            return self._failed(self.broken)
        if any(first < -(-e // PAGE) * PAGE and s // PAGE * PAGE < end for s, e in self.registered.items()):
            return self._failed(ALREADY_REGISTERED)
        if sum(e - s for s, e in self.registered.items()) + num_bytes > self.pin_limit:
            return self._failed(NO_MEMORY)
        self.registered[address] = address + num_bytes
        self._owners[address] = self.current
        return SUCCESS

    def _unregister(self, address: int) -> int:
        self.contexts.add(self.current)
        if self.broken:
            return self._failed(self.broken)
        if address not in self.registered:
            return self._failed(NOT_REGISTERED)
        assert not any(stream.queue for stream in self.streams), "unregistered while work is under way"
        del self.registered[address]
        return SUCCESS

    def is_pinned(self, address: int, num_bytes: int) -> bool | None:
        """Return whether this host memory is pinned; None if only a part of it is."""
        num_pinned = 0
        for ranges in (self.registered, self.pinned):
            starts = sorted(ranges)
            at = max(0, bisect.bisect_right(starts, address) - 1)
            for start in starts[at:]:
                num_pinned += max(0, min(ranges[start], address + num_bytes) - max(start, address))
                if start <= address and address + num_bytes <= ranges[start]:
                    return True
        return None if num_pinned else False

    def allocate_pinned(self, made: torch.Tensor) -> torch.Tensor:
        """Allocate pinned memory like torch's allocator, if there is room."""
        self.contexts.add(self.current)
        self.check()
        num_bytes = made.numel() * made.element_size()
        if sum(e - s for s, e in self.pinned.items()) + num_bytes > self.pin_limit:
            raise RuntimeError(f"CUDA error: {NO_MEMORY}")
        if num_bytes:
            self.pinned[made.data_ptr()] = made.data_ptr() + num_bytes
            self._kept.append(made)
        return made

    def mapped(self, array: Any, index: int) -> Any:
        """Return host memory as a tensor on the device, like torch for an array of the device."""
        facts = dict(array.__cuda_array_interface__)
        host = torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=facts)))
        self._kept.append(array)
        if self.copies_foreign and self._owners.get(self._start_of(host.data_ptr()), index) != index:
            return self.tensor(host, index)
        self._mapped.append(_extent(host))
        return host.as_subclass(type("DeviceTensor", (DeviceTensor,), {"index": index}))

    def check_mapped(self, tensor: torch.Tensor) -> None:
        """Raise an error if a kernel accesses host memory that is not pinned."""
        start, end = _extent(tensor)
        if any(first <= start < last for first, last in self._mapped):
            pieces = (min(e, end) - max(s, start) for s, e in self.registered.items())
            if sum(piece for piece in pieces if piece > 0) < end - start:
                self.break_device()
                raise RuntimeError(f"CUDA error: {ILLEGAL_ADDRESS}")

    def _start_of(self, address: int) -> int:
        """Return the start of the registered range with this address; -1 if there is none."""
        return next((start for start, end in self.registered.items() if start <= address < end), -1)

    def device_pointer(self, pointer: Any, address: Any, flags: Any) -> int:
        """`cudaHostGetDevicePointer`; arguments of `ctypes`."""
        if self._start_of(address.value) < 0:
            return self._failed(INVALID_VALUE)
        pointer._obj.value = address.value if self.can_map else address.value + (1 << 40)
        return SUCCESS

    def progress(self) -> None:
        """Run submitted work as `order` demands."""
        for stream in self.streams:
            while stream.queue and (
                self.order == EARLY or (self.rng is not None and self.rng.random() < 0.3)
            ):
                stream.run_one()

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Submit a copy between device and host to the current stream."""
        self.check()
        host = source if isinstance(target, DeviceTensor) else target
        raw = [tensor.as_subclass(torch.Tensor) for tensor in (target, source)]
        num_bytes = sum(step * (size - 1) for step, size in zip(host.stride(), host.shape, strict=True)) + 1
        pinned = self.is_pinned(host.data_ptr(), num_bytes * host.element_size()) if host.numel() else True
        if pinned is None:
            self._failed(INVALID_VALUE)
            raise RuntimeError(
                f"CUDA error: {self.take_last_error()}: a copy of memory that is pinned in part"
            )
        stream = self.current_stream()
        stream.submit(lambda: raw[0].copy_(raw[1]))
        if not pinned or not non_blocking:
            self.host_waits += 1
            while stream.queue:
                stream.run_one()

    def kernel(self, act: Callable[[], None], *accessed: torch.Tensor) -> None:
        """Submit a kernel to the current stream. `accessed`: tensors that may be host memory."""
        self.launch()

        def run() -> None:
            for tensor in accessed:
                self.check_mapped(tensor)
            act()

        self.current_stream().submit(run)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and behind its last byte."""
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


class _Intercepted(TorchFunctionMode):
    """Redirects torch functions on device tensors to the fake."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda = kwargs or {}, self._cuda
        if func is torch.empty and kwargs.pop("pin_memory", False):
            return cuda.allocate_pinned(torch.empty(*args, **kwargs))
        if func is torch.as_tensor and str(kwargs.get("device", "")).startswith("cuda"):
            return cuda.mapped(args[0], torch.device(kwargs["device"]).index)
        if func is torch.zeros and str(kwargs.get("device", "")).startswith("cuda"):
            del kwargs["device"]
            return cuda.tensor(torch.zeros(*args, **kwargs), cuda.current)
        if func is torch.Tensor.add_ and isinstance(args[0], DeviceTensor):
            raw = args[0].as_subclass(torch.Tensor)
            cuda.kernel(lambda: raw.add_(args[1]))
            return args[0]
        if func is torch.Tensor.is_pinned:
            # Like torch, which examines the first byte of the storage.
            return cuda.is_pinned(args[0].untyped_storage().data_ptr(), 1) is True
        if func is torch.Tensor.copy_ and any(isinstance(argument, DeviceTensor) for argument in args[:2]):
            cuda.copy(*args[:2], kwargs.get("non_blocking", False))
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            return self._to(*args[:2], kwargs.get("non_blocking", False))
        if func is torch.Tensor.index_select and isinstance(args[0], DeviceTensor):
            return self._index_select(*args)
        if func is torch.cat and isinstance(args[0][0], DeviceTensor):
            return self._made(func, args[0], *args[1:])
        if func is torch.Tensor.contiguous and isinstance(args[0], DeviceTensor):
            return args[0] if args[0].is_contiguous() else self._made(func, args[0])
        if func is torch.Tensor.index_copy_ and isinstance(args[0], DeviceTensor):
            assert isinstance(args[2], DeviceTensor), "indices on the host"
            raw = [tensor.as_subclass(torch.Tensor) for tensor in (args[0], *args[2:])]
            cuda.kernel(lambda: raw[0].index_copy_(args[1], *raw[1:]), raw[0])
            return args[0]
        return func(*args, **kwargs)

    def _to(self, tensor: torch.Tensor, device: Any, non_blocking: bool) -> Any:
        made = self._cuda.tensor(torch.zeros_like(tensor), torch.device(device).index)
        self._cuda.copy(made, tensor, non_blocking)
        return made

    def _made(self, func: Any, source: Any, *rest: Any) -> Any:
        """Run a kernel whose result is a new tensor."""
        first, raw = (
            (source[0], [each.as_subclass(torch.Tensor) for each in source])
            if isinstance(source, list)
            else (source, source.as_subclass(torch.Tensor))
        )
        made = self._cuda.tensor(torch.zeros_like(func(raw, *rest)), first.device.index)
        into = made.as_subclass(torch.Tensor)
        self._cuda.kernel(lambda: into.copy_(func(raw, *rest)))
        return made

    def _index_select(self, tensor: Any, dimension: int, indices: Any) -> Any:
        assert isinstance(indices, DeviceTensor), "indices on the host"
        shape = (len(indices), *tensor.shape[1:])
        made = self._cuda.tensor(torch.zeros(shape, dtype=tensor.dtype), tensor.device.index)
        raw = [tensor.as_subclass(torch.Tensor) for tensor in (tensor, indices, made)]
        self._cuda.kernel(lambda: raw[2].copy_(raw[0].index_select(dimension, raw[1])), raw[0])
        return made


@contextlib.contextmanager
def installed(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """Replace ``torch.cuda`` by the fake in a block."""
    real, torch.cuda = torch.cuda, cuda  # type: ignore[assignment]
    library, pinned.runtime_library = pinned.runtime_library, lambda: cuda.library  # type: ignore[assignment]
    try:
        with _Intercepted(cuda):
            yield cuda
    finally:
        torch.cuda = real  # type: ignore[assignment]
        pinned.runtime_library = library
