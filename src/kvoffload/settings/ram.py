"""The option ``ram``: the size of the memory for blocks, and whether the processes of a machine share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from kvoffload.errors import ConfigError
from kvoffload.settings.read import Duration, NotNegative, OneOf, Size, convert, given_once, within

NODE = "node"


@dataclass(frozen=True)
class RamOptions:
    """RAM for blocks: ``64GiB``, ``64GiB,shared=node``, or ``{"size": "64GiB", "shared": "node"}``.

    Attributes:
        size: size in bytes. In vLLM, it is the sum over all workers of the engine.
        shared: ``node`` or None. With ``node``, this user's engines on this machine share one pool of this
            size if they produce equal blocks, which requires the same model, weights, vLLM version and layout
            (docs/node-pool.md). None: the engine has its own pool.
        keep_s: how long a shared pool remains after its last engine has ended, in seconds; 0: the pool is
            removed at once.
        share: bytes of a shared pool that are guaranteed to this engine while it runs. Other engines may use
            these bytes as long as this engine does not need them. None: nothing is guaranteed.
    """

    size: Size
    shared: Annotated[str, OneOf((NODE,))] | None = None
    keep_s: NotNegative = field(default=600.0, metadata={"option": "keep"})
    share: Size | None = None

    def share_blocks(self, num_blocks: int) -> int:
        """Return `share` in blocks, rounded down, for a pool of `num_blocks` blocks; 0 without a share."""
        return (self.share or 0) * num_blocks // self.size


class _RamParser:
    allowed = "bytes, or a size such as 64GiB; for one pool for all engines of a machine 64GiB,shared=node"

    def parse(self, field: str, value: object) -> RamOptions:
        if isinstance(value, RamOptions):
            return value
        if isinstance(value, str) and "," in value:
            given_size, *settings = value.split(",")
            named = (setting.partition("=") for setting in settings)
            value = given_once(field, [("size", given_size), *((name, text) for name, _, text in named)])
        if not isinstance(value, Mapping) or not value:
            return RamOptions(convert(field, value, Size))
        given = {**value}
        if (keep := given.get("keep")) not in (None, 0, "0"):
            try:
                given["keep"] = convert(f"{field}.keep", keep, Duration)
            except ConfigError:
                raise ConfigError(
                    f"{field}.keep", keep, "allowed: 0, or a time such as 60, 10min, 1h"
                ) from None
        options = within(field, RamOptions, given)
        for name in ("keep", "share"):
            if given.get(name) is not None and not options.shared:
                raise ConfigError(f"{field}.{name}", value[name], f"allowed with shared={NODE}")
        if options.share is not None and options.share > options.size:
            raise ConfigError(f"{field}.share", given["share"], f"allowed: up to the size, {given['size']}")
        return options


Ram: TypeAlias = Annotated[RamOptions, _RamParser()]
