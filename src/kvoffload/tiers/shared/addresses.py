"""Host name resolution on background threads, and connection attempts with a deadline."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

SocketAddress: TypeAlias = "tuple[int, Any]"
"""Family and address of a socket."""
Resolve: TypeAlias = Callable[[str, int], Sequence[SocketAddress]]
"""Function that resolves a host and a port. Raises `OSError`. May block for any time."""

_FRESH_S = 30.0
_MOST_ADDRESSES, _MOST_HOSTS = 16, 512
_LONGEST_HEAD_START_S = 0.25


def getaddrinfo(host: str, port: int) -> list[SocketAddress]:
    """Resolve a host with the system's resolver. A literal address needs no name server."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in answers]


class Addresses:
    """A cache of host addresses, renewed in the background.

    The first call of `connected` for a host waits for the host's lookup, at most until the deadline. Later
    calls use the cached addresses without waiting. In two cases a call also starts a new lookup in the
    background: if the cached addresses are older than 30 s, or if the last call could not connect to any of
    them. A failed lookup leaves the cached addresses unchanged.

    Each host has at most one lookup in progress, on a daemon thread. The lookup may hang.

    Args:
        resolve, clock: for tests.

    Thread: any.
    """

    def __init__(self, resolve: Resolve = getaddrinfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._resolve, self._clock = resolve, clock
        self._changed = threading.Condition()
        self._kept: dict[tuple[str, int], tuple[list[SocketAddress], float]] = {}
        self._errors: dict[tuple[str, int], OSError] = {}
        self._looking_up: set[tuple[str, int]] = set()

    def connected(self, host: str, port: int, deadline: float) -> socket.socket:
        """Connect to a host; returns a non-blocking socket to the first address that accepts.

        Raises: `TimeoutError` at the deadline (of `time.monotonic`); otherwise the `OSError` of the last
        address.
        """
        addresses = self._resolved(host, port, deadline)
        try:
            winner, answered = race(addresses, deadline)
        except OSError:
            self.renew(host, port)
            raise
        with self._changed:
            kept = self._kept.get((host, port), ([], 0.0))[0]
            if answered in kept[1:]:
                kept.remove(answered)
                kept.insert(0, answered)
        return winner

    def known(self, host: str, port: int) -> list[SocketAddress]:
        """Return the cached addresses; an empty list while the first lookup is in progress. Never waits.

        Raises: `OSError` if the first lookup has failed. The error is raised once; the next call starts
        another lookup.
        """
        if _is_literal(host):
            return getaddrinfo(host, port)
        name = host, port
        with self._changed:
            kept, until = self._kept.get(name, ([], 0.0))
            if not kept and name in self._errors and name not in self._looking_up:
                raise self._errors.pop(name)
            if self._clock() >= until:
                self._begin_lookup(name)
            return [*kept]

    def renew(self, host: str, port: int) -> None:
        """Mark the cached addresses as outdated. The next call for the host starts a lookup."""
        with self._changed:
            if (host, port) in self._kept:
                self._kept[host, port] = self._kept[host, port][0], 0.0

    # ---- inside

    def _resolved(self, host: str, port: int, deadline: float) -> list[SocketAddress]:
        if _is_literal(host):
            return getaddrinfo(host, port)
        name = host, port
        with self._changed:
            kept, until = self._kept.get(name, ([], 0.0))
            if self._clock() >= until:
                self._errors.pop(name, None)
                self._begin_lookup(name)
            while not kept:
                if name in self._errors:
                    error = self._errors[name]
                    raise type(error)(*error.args)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("the host was not found in time: no answer from the name server")
                kept = self._kept.get(name, ([], 0.0))[0]
            return [*kept]

    def _begin_lookup(self, name: tuple[str, int]) -> None:
        if name in self._looking_up or len(self._looking_up) >= _MOST_HOSTS:
            return
        thread = threading.Thread(target=self._look_up, args=(name,), name="kvoffload-resolver", daemon=True)
        self._looking_up.add(name)
        try:
            thread.start()
        except RuntimeError as error:
            self._looking_up.discard(name)
            self._errors[name] = OSError(str(error))

    def _look_up(self, name: tuple[str, int]) -> None:
        addresses: list[SocketAddress] = []
        error: OSError = OSError("the host has no address")
        try:
            addresses = [*dict.fromkeys(self._resolve(*name))][:_MOST_ADDRESSES]
        except (OSError, ValueError, OverflowError) as problem:
            # For some names, and for ports above 65,535, Python raises other errors than `OSError`.
            error = problem if isinstance(problem, OSError) else OSError("the host is not a name")
        with self._changed:
            self._looking_up.discard(name)
            until = self._clock() + _FRESH_S
            if addresses:
                before = self._kept.get(name, ([], 0.0))[0]
                addresses.sort(key=lambda address: address not in before[:1])  # the last winner stays first
                self._kept[name] = addresses, until
            elif name in self._kept:
                self._kept[name] = self._kept[name][0], until
            else:
                self._errors[name] = error
            for table in (self._kept, self._errors):
                while len(table) > _MOST_HOSTS:
                    del table[next(iter(table))]
            self._changed.notify_all()


def race(addresses: Sequence[SocketAddress], deadline: float) -> tuple[socket.socket, SocketAddress]:
    """Connect to the first address that accepts, with one deadline for all addresses (as RFC 8305).

    Attempts run concurrently and start 0.25 s apart. If the deadline is near, the interval is shorter, so
    that all attempts start in the first half of the time. If all attempts so far have failed, the next
    attempt starts at once.

    Returns: a non-blocking socket, and its address. Raises: `TimeoutError`, or the last `OSError`.
    """
    begun = time.monotonic()
    head_start_s = min(_LONGEST_HEAD_START_S, max(0.0, deadline - begun) / (2 * len(addresses)))
    error: OSError = TimeoutError("no address of the host has answered in time")
    waiting, next_at = list(addresses), begun
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError("no address of the host has answered in time")
            if waiting and (now >= next_at or not selector.get_map()):
                candidate = waiting.pop(0)
                next_at = min(next_at, now) + head_start_s  # a late start does not delay the next
                try:
                    _begin(candidate, selector, stack)
                except OSError as problem:
                    error = problem
                continue
            if not selector.get_map():
                raise error
            for key, _ in selector.select(min(deadline, next_at if waiting else deadline) - now):
                attempt = key.fileobj
                assert isinstance(attempt, socket.socket)
                selector.unregister(attempt)
                if (number := attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) == 0:
                    # The stack closes all sockets, so return a copy of the winner's descriptor.
                    return attempt.dup(), key.data
                error = OSError(number, os.strerror(number))  # for example a `ConnectionRefusedError`
                attempt.close()


def _begin(candidate: SocketAddress, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
    family, address = candidate
    attempt = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    attempt.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        attempt.connect(address)
    selector.register(attempt, selectors.EVENT_WRITE, candidate)


def is_loopback(host: str) -> bool:
    """Return True for ``localhost`` and for loopback addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
