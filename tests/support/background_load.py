"""Threads that use machines while a test stops their server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

Action = Callable[[np.random.Generator], object]


@contextmanager
def background_load(actions: Sequence[Action]) -> Iterator[None]:
    """Repeat each action in its own thread until the end of the context, and at least 10 times.

    An action gets a generator of random numbers. Raises the first exception of an action at the end.
    """
    over, errors, counts = threading.Event(), list[BaseException](), [0] * len(actions)

    def repeat(row: int) -> None:
        random = np.random.default_rng(row)
        try:
            while counts[row] < 10 or not over.is_set():
                actions[row](random)
                counts[row] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(row,)) for row in range(len(actions))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
