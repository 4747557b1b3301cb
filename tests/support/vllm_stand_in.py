"""Stand-ins for the vLLM modules that our copies on devices need, made from recorded signatures.

Every function has the signature of the chosen version. The handler moves bytes between tensors in host memory
only when `wait` is called, because a device may be as late as that.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import kvoffload.integrations
from support.vllm_forms import forms, signature

HANDLER = "SingleDirectionOffloadingHandler"
HOST_REGISTER = "vllm.v1.kv_offload.cpu.host_register"
OURS = "kvoffload.integrations.vllm"


@dataclass
class Device:
    """Calls received by the stand-ins, and failures that they simulate.

    Attributes:
        log: calls in order: ``pin``, ``unpin`` and ``shutdown``, with their arguments.
        handlers: all handlers.
        refused: number, from 0, of the `host_register` call to refuse.
        failing: a direction whose `shutdown` raises.
        refusing: "at once" to refuse transfers, another text to let them fail later.
        stuck: a direction whose `wait` raises.
        on_pinning: called at each call that pins or unpins.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    handlers: list[Any] = field(default_factory=list)
    refused: int = -1
    failing: str = ""
    refusing: str = ""
    stuck: str = ""
    on_pinning: Callable[[], None] = lambda: None

    def host_register(self, ptr: int, num_bytes: int) -> bool:
        self.on_pinning()
        self.log.append(("pin", ptr, num_bytes))
        return sum(entry[0] == "pin" for entry in self.log) - 1 != self.refused

    def host_unregister(self, ptr: int) -> None:
        self.on_pinning()
        self.log.append(("unpin", ptr))

    @property
    def pinned(self) -> list[tuple[int, int]]:
        """Address and bytes of each call of `host_register`."""
        return [entry[1:] for entry in self.log if entry[0] == "pin"]

    def times(self, call: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == call]


class Handler:
    """Copies of one direction, in the order of submission."""

    def __init__(self, device: Device, **given: Any) -> None:
        self.device, self.given = device, SimpleNamespace(**given)
        self.name = "store" if given["gpu_to_cpu"] else "load"
        self.waiting: deque[tuple[int, Any, Any]] = deque()
        self.done: list[Any] = []
        self.is_open = True
        for gpu_tensor, cpu_tensor in zip(given["gpu_tensors"], given["cpu_tensors"], strict=True):
            assert str(gpu_tensor.dtype) == str(cpu_tensor.dtype) == "torch.int8"
            assert gpu_tensor.ndim == cpu_tensor.ndim == 2
            assert cpu_tensor.shape[1] == gpu_tensor.shape[1] * given["blocks_per_chunk"]
        device.handlers.append(self)

    def transfer_async(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        assert self.is_open
        if self.device.refusing == "at once":
            return False
        self.waiting.append((job_id, src_spec, dst_spec))
        return True

    def get_finished(self) -> list[Any]:
        assert self.is_open
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        assert self.is_open
        if self.device.stuck == self.name:
            raise RuntimeError("the event is gone")
        while any(job in job_ids for job, _, _ in self.waiting):
            self._run()

    def shutdown(self) -> None:
        assert self.is_open
        while self.waiting:
            self._run()
        self.is_open = False
        self.device.log.append(("shutdown", self.name))
        if self.device.failing == self.name:
            raise RuntimeError("the device is gone")

    def _run(self) -> None:
        job, source, target = self.waiting.popleft()
        engine, slots = (source, target) if self.given.gpu_to_cpu else (target, source)
        num_bytes = 0
        for group, inner, block, slot in self._places(engine, slots.block_ids.tolist()):
            for ref in self.given.layer_refs_per_group[group]:
                gpu_tensor, cpu_tensor = (
                    self.given.gpu_tensors[ref.tensor_idx],
                    self.given.cpu_tensors[ref.tensor_idx],
                )
                begin = inner * gpu_tensor.shape[1]
                there, here = (
                    gpu_tensor[block, : ref.page_size_bytes],
                    cpu_tensor[slot, begin : begin + ref.page_size_bytes],
                )
                (here.copy_(there) if self.given.gpu_to_cpu else there.copy_(here))
                num_bytes += ref.page_size_bytes
        success = self.device.refusing != "later"
        self.done.append(
            SimpleNamespace(job_id=job, success=success, transfer_size=num_bytes, transfer_time=0.5)
        )

    def _places(self, engine: Any, slots: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Group, place in its chunk, block and slot of each block of a transfer."""
        blocks, per_chunk = iter(engine.block_ids.tolist()), self.given.blocks_per_chunk
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            begin = first % per_chunk
            chunks = [slots.pop(0) for _ in range(-(-(begin + size) // per_chunk) if size else 0)]
            for number in range(begin, begin + size):
                yield group, number % per_chunk, next(blocks), chunks[number // per_chunk]
        assert not slots
        assert next(blocks, None) is None


def as_recorded(form: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with the recorded signature."""
    takes = signature(form)

    def checked(*args: Any, **kwargs: Any) -> Any:
        return call(**takes.bind(*args, **kwargs).arguments)

    return checked


def handler_class(device: Device, version: str) -> type:
    """vLLM's handler in this version."""
    of_version = forms(HANDLER, version)
    calls: dict[str, Any] = {
        name: as_recorded(of_version[name], getattr(Handler, name))
        for name in of_version
        if name != "__init__"
    }
    make = as_recorded(of_version["__init__"], lambda self, **given: Handler.__init__(self, device, **given))
    return type(HANDLER, (Handler,), calls | {"__init__": make})


def modules_of(device: Device, version: str, *, is_cpu: bool) -> dict[str, ModuleType | None]:
    """Return the modules of vLLM that ours import, by name; None for a module that the version lacks."""
    offload = "vllm.v1.kv_offload"
    made: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{version}.0"},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
        "vllm.v1": {},
        offload: {},
        f"{offload}.base": {"LookupResult": Enum("LookupResult", ["MISS", "HIT", "HIT_PENDING", "RETRY"])},
        f"{offload}.cpu": {},
        f"{offload}.cpu.common": {},
        f"{offload}.cpu.gpu_worker": {HANDLER: handler_class(device, version)},
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {},
    }
    registering = forms(HOST_REGISTER, version)
    if registering:
        made[HOST_REGISTER] = {
            name: as_recorded(form, getattr(device, name)) for name, form in registering.items()
        }
    modules: dict[str, ModuleType | None] = {HOST_REGISTER: None}
    for name, members in made.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        module = modules[name] = ModuleType(name)
        vars(module).update(members, __getattr__=_empty_class)
    return modules


def _empty_class(name: str) -> type:
    """Return an empty class for a vLLM class that ours only derive from, or create and fill."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: vars(self).update(kwargs)})


@contextmanager
def standing_in(device: Device, version: str, *, is_cpu: bool = False) -> Iterator[None]:
    """In the block, imports of vLLM return the stand-ins, and imports of our modules make new modules."""

    def concerned(name: str) -> bool:
        return name.split(".")[0] == "vllm" or name == OURS or name.startswith(f"{OURS}.")

    kept = {name: module for name, module in sys.modules.items() if concerned(name)}
    room = kvoffload.integrations.vllm
    for name in kept:
        del sys.modules[name]
    sys.modules.update(modules_of(device, version, is_cpu=is_cpu))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if concerned(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        kvoffload.integrations.vllm = room
