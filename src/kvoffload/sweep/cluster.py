"""Runs the replays of a sweep on a Dask cluster. Only this module imports `distributed`.

Each trace is sent to the cluster's workers once. Workers need this package, but no files of this machine.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from kvoffload._version import __version__
from kvoffload.errors import ConfigError, SweepError
from kvoffload.sweep.task import Task, TraceSource, attempt_with, code_digest, load
from kvoffload.sweep.workers import Results

_TIMEOUT_S = 5
"""Time limit, in seconds, for each of two waits: until the scheduler answers, and until it has a worker."""


class ClusterWorkers:
    """Workers of a Dask cluster whose scheduler is running.

    The constructor connects to the scheduler and checks that all workers run the same code as this process.
    It raises `ConfigError` if the package `distributed` is missing, if the scheduler does not answer within
    `timeout_s`, if the scheduler has no workers, or if a worker runs other code.
    """

    def __init__(self, address: str, timeout_s: float = _TIMEOUT_S, digest: str | None = None) -> None:
        self._timeout_s, self._digest = timeout_s, digest or code_digest()
        # Kept until `close`: Dask derives the key of a trace from its content, and loses a trace that is sent
        # again while its release is in flight.
        self._traces: dict[TraceSource, Any] = {}
        try:
            import distributed
        except ImportError:
            raise ConfigError(
                "scheduler", address, "the package distributed is missing: pip install 'kvoffload[dask]'"
            ) from None
        self._distributed: Any = distributed
        try:
            # Checked before the client is created: a client whose constructor fails cannot be closed.
            asyncio.run(_check_connection(address, timeout_s))
            self._client: Any = self._distributed.Client(address, timeout=timeout_s, set_as_default=False)
        except Exception as error:
            # Dask reads the first bytes of a reply as a length. The reply of a web server gives an absurd
            # length, hence a `MemoryError`.
            is_other = isinstance(error, MemoryError)
            reason = "another service answers there" if is_other else " ".join(str(error).split())
            raise ConfigError(
                "scheduler", address, f"no Dask scheduler answers within {timeout_s} s ({reason})"
            ) from None
        try:
            self._check(address)
        except BaseException:
            self._client.close()
            raise

    def results(self, tasks: Sequence[Task]) -> Results:
        futures = {}
        try:
            for task in tasks:
                if task.source not in self._traces:
                    self._traces[task.source] = self._client.scatter(load(task.source), broadcast=True)
                # `pure=False`, because Dask must not reuse an earlier result.
                future = self._client.submit(attempt_with, self._traces[task.source], task, pure=False)
                futures[future] = task
            for future in self._distributed.as_completed(list(futures), loop=self._client.loop):
                try:
                    result = future.result()
                except Exception as error:
                    raise SweepError(f"the cluster lost a replay ({type(error).__name__}: {error})") from None
                yield futures.pop(future), result
        finally:
            self._client.cancel(list(futures))

    def close(self) -> None:
        """Disconnect from the cluster, which keeps running."""
        self._client.close()

    def _check(self, address: str) -> None:
        if not self._client.scheduler_info()["workers"]:
            try:
                self._client.wait_for_workers(1, timeout=self._timeout_s)
            except (TimeoutError, asyncio.TimeoutError):  # Two classes before Python 3.11.
                raise ConfigError("scheduler", address, "the scheduler has no workers") from None
        for worker, answer in self._client.run(code_digest, on_error="return").items():
            if answer != self._digest:
                code = f"{answer}" if isinstance(answer, Exception) else "other code"
                raise ConfigError(
                    "scheduler", address, f"its workers need kvoffload {__version__}; {worker}: {code}"
                )


async def _check_connection(address: str, timeout_s: float) -> None:
    """Connect to the scheduler, complete the handshake and disconnect. Raises the connection's errors."""
    comm: Any = importlib.import_module("distributed.comm")
    (await comm.connect(address, timeout=timeout_s)).abort()
