"""Describes exceptions in users' classes, such as a policy from a file.

A description names the failed method and its block, and has the part of the traceback from this method on.
A class counts as a user's class if a `Registry` accepts it and its code is outside of this package.
This module knows no methods of the classes.
"""

from __future__ import annotations

import inspect
import os
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from kvoffload.settings.registry import Registry

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class PluginFailure(NamedTuple):
    """An exception that a user's class raised.

    Attributes:
        summary: one line with the class, the method, the arguments that are numbers or keys, and the
            exception.
        traceback: the traceback, without the frames that called the user's method.
    """

    summary: str
    traceback: str


def plugin_failure(error: BaseException) -> PluginFailure | None:
    """Describe `error` if a method of a user's class raised it, otherwise return None.

    If a user's method called another user's method through this package, the method that was called last is
    described.
    """
    innermost: tuple[TracebackType, str] | None = None
    calls_it, entry = False, error.__traceback__
    while entry is not None:
        is_ours = entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)
        if calls_it and not is_ours and (name := _name_of(entry.tb_frame)):
            innermost = entry, name
        calls_it, entry = is_ours, entry.tb_next
    if innermost is None:
        return None
    entry, name = innermost
    exception = f"{type(error).__name__}: {error}".removesuffix(": ").replace("\n", " ")
    at = traceback.extract_tb(entry)[-1]
    summary = f"{name} raised {exception} ({Path(at.filename).name}, line {at.lineno})"
    return PluginFailure(summary, "".join(traceback.format_exception(type(error), error, entry)))


def _name_of(frame: FrameType) -> str:
    """Describe a user's method call: ``policy Mine: victim(key 3f1a)``; return ``""`` for other frames."""
    arguments = inspect.getargvalues(frame)
    if not arguments.args:
        return ""
    owner = arguments.locals.get(arguments.args[0])
    cls = owner if isinstance(owner, type) else type(owner)
    field = next((registry.field for registry in Registry.all if registry.accepts(cls)), "")
    if not field:
        return ""
    shown = [_shown(name, arguments.locals.get(name)) for name in arguments.args[1:]]
    blocks = ", ".join(filter(None, shown))
    method = frame.f_code.co_name
    return f"{field} {cls.__name__}: {method}({blocks})" if blocks else f"{field} {cls.__name__}: {method}"


def _shown(name: str, value: object) -> str:
    """Format an argument that identifies a block, a number or a key; return ``""`` for other arguments."""
    if isinstance(value, bytes):
        return f"{name} {value.hex()}"
    return f"{name} {value}" if isinstance(value, int) and not isinstance(value, bool) else ""
