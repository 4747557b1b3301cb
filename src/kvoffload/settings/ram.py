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
        size: size in bytes. In vLLM, it is the total of all workers of the engine.
        shared: ``node`` or empty. With ``node``, all engines of the user on this machine whose blocks are
            equal share one pool of this size. If empty, the engine has its own pool.
        keep_s: seconds for which a shared pool remains after its last engine has ended; 0: the pool is
            removed at once.
        share: number of bytes of a shared pool that belong to this engine while it runs. Other engines may
            use these bytes while this engine does not use them. None: no share.
    """

    size: Size
    shared: Annotated[str, OneOf((NODE,))] | None = None
    keep_s: NotNegative = field(default=600.0, metadata={"option": "keep"})
    share: Size | None = None

    def share_blocks(self, num_blocks: int) -> int:
        """Convert `share` to blocks of a pool with `num_blocks` blocks, rounded down; 0 without a share."""
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
