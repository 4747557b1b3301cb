"""The twin of W-TinyLFU."""

from __future__ import annotations

from kvoffload.core.policy import BlockwisePolicy
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.choice import first_unprotected
from support.naive.sketch import NaiveSketch


class NaiveWTinyLFU(BlockwisePolicy):
    """Twin of `policies.wtinylfu.WTinyLFU`; its docstring has the conventions.

    Attributes:
        window, probation, protected: slot to key of the blocks, the coldest first.
    """

    name = "naive-wtinylfu"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.max_window = max(1, self.capacity_blocks // 100)
        self.max_main = self.capacity_blocks - self.max_window
        self.max_protected = self.max_main * 4 // 5
        self.sketch = NaiveSketch(self.capacity_blocks)
        self.reset()

    def reset(self) -> None:
        self.window: dict[int, bytes] = {}
        self.probation: dict[int, bytes] = {}
        self.protected: dict[int, bytes] = {}
        self.sketch.clear()
        self._counted = self.is_victim_tier = False

    def hit(self, slot: int) -> None:
        home = self._home(slot)
        if self.is_victim_tier:
            self.probation[slot] = home.pop(slot)
            return
        self.sketch.add(home[slot])
        if home is self.probation:
            self.protected[slot] = home.pop(slot)
            if len(self.protected) > self.max_protected:
                demoted = next(iter(self.protected))
                self.probation[demoted] = self.protected.pop(demoted)
        else:
            self.refresh(slot)

    def refresh(self, slot: int) -> None:
        home = self._home(slot)
        home[slot] = home.pop(slot)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        self.is_victim_tier = not protected.one_prefix
        super().replace(keys, slots, num_free, protected)
        for _ in range(num_free):
            if len(self.window) > self.max_window and self._main_has_room():
                self._enter_main(next(iter(self.window)))

    def insert(self, slot: int, key: bytes) -> None:
        if not self._counted:  # The slot was free.
            self.sketch.add(key)
        self._counted = False
        self.window[slot] = key

    def victim(self, key: bytes, protected: Protected) -> int:
        self.sketch.add(key)
        self._counted = True
        may_grow = True
        while True:
            candidate = first_unprotected(self.window, protected)
            defender = first_unprotected([*self.probation, *self.protected], protected)
            if candidate is None and defender is None:
                raise PolicyError(f"no block may leave for {key.hex()}")
            if candidate is None:
                return self._drop(defender)
            if defender is None:
                return self._drop(candidate)
            if len(self.window) + 1 <= self.max_window:
                return self._drop(defender)
            if self._seen(candidate) <= self._seen(defender):
                return self._drop(candidate)
            grows = may_grow and self._main_has_room()
            self._enter_main(candidate)
            if not grows:
                return self._drop(defender)
            may_grow = False

    def forget(self, slot: int) -> None:
        self._drop(slot)

    def _home(self, slot: int) -> dict[int, bytes]:
        return next(home for home in (self.window, self.probation, self.protected) if slot in home)

    def _drop(self, slot: int | None) -> int:
        assert slot is not None
        del self._home(slot)[slot]
        return slot

    def _seen(self, slot: int) -> int:
        return self.sketch.estimate(self._home(slot)[slot])

    def _main_has_room(self) -> bool:
        return len(self.probation) + len(self.protected) < self.max_main

    def _enter_main(self, slot: int) -> None:
        self.probation[slot] = self.window.pop(slot)

    def stats(self) -> dict[str, float]:
        return {
            "window_blocks": len(self.window),
            "probation_blocks": len(self.probation),
            "protected_blocks": len(self.protected),
        }

    def order(self) -> list[int]:
        return [*self.window, *self.probation, *self.protected]

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Return the slots of window, probation and protected, each most recent first."""
        return [*self.window][::-1], [*self.probation][::-1], [*self.protected][::-1]
