"""Refusal of rope types with which the KV of a token depends on the length of the whole sequence.

Known rope types of this kind are refused by name. Any other model is tested (probed): its last token is moved
to a far position, and the KV of the earlier tokens must stay the same.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from kvoffload.errors import ConfigError

_NAMES = ("rotary", "rope")
_FACTORS = (4, 64)
"""Sequence lengths that are probed, divided by ``max_position_embeddings``."""
LONGEST_TABLE = 1 << 19
"""Longest sequence length that is probed. A module may compute a table of all positions, which takes 256 MiB
at this length."""
_TOLERANCE = 0.02
"""Largest difference that counts as rounding, divided by the largest value of the tensor."""
_ALLOWED = "allowed: rope whose KV does not depend on the total length, such as default, yarn"


def check_rope(fields: Any, path: str = "model.config", in_rope: bool = False) -> None:
    """Refuse types of rope that are known to depend on the length of the sequence.

    Args:
        fields: a model's configuration as a dict, or a nested part of it.
        path: name of the part, for the error's message.
        in_rope: True if the part is inside ``rope_parameters`` or a similar field. Only there the field
            ``type``, which older configurations use, means the type of rope.

    Raises: `ConfigError` that names the field.
    """
    for name, value in _items(fields):
        where = f"{path}.{name}"
        is_type = name == "rope_type" or (in_rope and name == "type")
        if is_type and isinstance(value, str) and ("dynamic" in value or value in ("longrope", "su")):
            raise ConfigError(where, value, _ALLOWED)
        check_rope(value, where, in_rope or name.startswith("rope_"))


def probe_rope(model: Any, longest: int, kv_of: Callable[[list[int]], list[torch.Tensor]]) -> None:
    """Refuse a model whose KV depends on the length of the sequence, whatever the name of its rope type.

    The model computes a few tokens three times. In the first and third pass the last token is near the other
    tokens; in the second pass it is at position ``longest - 1``. The KV of the other tokens must be the same
    in all passes. Positions beyond `longest` could cause an error on a device, so for these only copies of
    the model's rotary modules are called, on the CPU. Rope that is computed outside of these modules is
    therefore checked only up to `longest`.

    Args:
        longest: ``max_position_embeddings``.
        kv_of: function that takes a list of positions, computes a token for each position, and returns the
            keys and values of all tokens except the last.

    Raises: `ConfigError`.
    """
    positions = [position for position in (0, 1, 5, 17, 61, 211) if position < longest - 4]
    if not positions:
        return
    near = [*positions, positions[-1] + 2]
    with _recorded_calls(model, {len(near), near[-1] + 1}) as calls:
        before = kv_of(near)
    if any(call.makes_table for call in calls):
        longest = min(longest, LONGEST_TABLE)
    for call in calls:
        name = type(call.module).__name__
        for length in (longest, *(factor * longest for factor in _FACTORS)):
            if length > max(longest, LONGEST_TABLE):
                break
            outcome = call.in_sequence(length)
            if outcome is Outcome.CHANGES:
                _refuse(model, f"its {name} changes for all tokens in sequences of {length} tokens")
            if outcome is Outcome.FAILS and length == longest:  # on a device the model would fail for good
                _refuse(model, f"its {name} does not compute position {longest - 1}")
    try:
        later = [kv_of([*positions, longest - 1]), kv_of(near)]
    except (IndexError, RuntimeError) as error:
        _refuse(model, f"it does not compute position {longest - 1}, so its rope cannot be checked: {error}")
    if not all(_is_equal(*pair) for kv in later for pair in zip(before, kv, strict=True)):
        _refuse(model, f"keys and values of all tokens change with a token at position {longest - 1}")


class Outcome(enum.Enum):
    """Effect of a longer sequence on the results of a rotary module for the tokens before the last."""

    SAME = "the results for the leading tokens are the same"
    CHANGES = "they differ"
    FAILS = "a table without such positions"
    UNKNOWN = "the module cannot be called on the CPU"


def _refuse(model: Any, what: str) -> NoReturn:
    raise ConfigError("model", type(model).__name__, f"{what}; {_ALLOWED}")


class _Call(NamedTuple):
    """Arguments with which a forward pass has called a rotary module, to call the module again.

    Attributes:
        lengths: values that may be the length of the sequence. An integer argument with one of these values
            is assumed to be the length.
    """

    module: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    lengths: Set[int]

    @property
    def makes_table(self) -> bool:
        """True if an argument is the sequence's length: the module then makes a table of positions."""
        return any(self._is_length(value) for value in (*self.args, *self.options.values()))

    def _is_length(self, value: Any) -> bool:
        return type(value) is int and value in self.lengths

    def in_sequence(self, length: int) -> Outcome:
        """Repeat the call with the last token at position ``length - 1``; compare the results for the other
        tokens.
        """

        def longer(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() > 1:
                value = value.clone()
                value.reshape(-1)[-1] = length - 1
            return length if self._is_length(value) else value

        try:
            module = copy.deepcopy(self.module).cpu()
            near = self._run(module, _as_given)
        except Exception:
            return Outcome.UNKNOWN
        try:
            far = self._run(module, longer)
        except (IndexError, RuntimeError):
            return Outcome.FAILS
        again = self._run(module, _as_given)
        is_equal = all(
            _is_equal(*_leading(before, after))
            for later in (far, again)
            for before, after in zip(near, later, strict=True)
        )
        return Outcome.SAME if is_equal else Outcome.CHANGES

    def _run(self, module: Any, change: Callable[[Any], Any]) -> list[torch.Tensor]:
        args = [change(_on_cpu(value)) for value in self.args]
        options = {name: change(_on_cpu(value)) for name, value in self.options.items()}
        with torch.no_grad():
            made = module.forward(*args, **options)
        results = made if isinstance(made, (tuple, list)) else (made,)
        return [result.clone() for result in results if isinstance(result, torch.Tensor)]


def _as_given(value: Any) -> Any:
    return value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


@contextmanager
def _recorded_calls(model: Any, lengths: Set[int]) -> Iterator[list[_Call]]:
    """Record the first call of each rotary module inside the ``with`` block. The list is filled when the
    block ends.
    """
    calls: dict[int, _Call] = {}

    def record(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.setdefault(id(module), _Call(module, args, options, lengths))

    made, hooks = list[_Call](), []
    for module in model.modules():
        name = type(module).__name__.lower()
        has_weights = next(module.parameters(), None) is not None
        if not has_weights and (hasattr(module, "inv_freq") or any(rotary in name for rotary in _NAMES)):
            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()
        made += calls.values()


def _leading(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut two results to their common size, without the last token, whose position differs between them."""
    for axis in range(min(first.ndim, second.ndim) - 1):
        size = min(first.shape[axis], second.shape[axis])
        size -= size > 1
        first, second = first.narrow(axis, 0, size), second.narrow(axis, 0, size)
    return first, second


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape, and their values differ at most by rounding.

    NaN and infinity are replaced by 0 before the comparison: the probe's tokens are arbitrary, so that their
    values may overflow.
    """
    first, second = (tensor.float().nan_to_num(0.0, 0.0, 0.0) for tensor in (first, second))
    bound = _TOLERANCE * float(first.abs().max()) if first.numel() else 0.0
    return first.shape == second.shape and torch.allclose(first, second, rtol=0.0, atol=bound)


def _items(fields: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(fields, list | tuple):
        fields = dict(enumerate(fields))
    return ((str(name), value) for name, value in fields.items()) if isinstance(fields, dict) else ()
