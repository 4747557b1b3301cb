"""A Dask cluster that does the replays of a sweep: the only importer of `distributed`.

A trace is sent to the workers once; they need this package, and no file of this machine.
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

TIMEOUT_S = 5


class ClusterWorkers:
    """The workers behind a scheduler that is already running.

    Construction connects and checks that the workers run the same code: their results are to be those of
    this machine. Raises `ConfigError` if the scheduler does not answer within `TIMEOUT_S`, has no workers,
    or has other ones.
    """

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise ConfigError(
                "scheduler", address, "it needs the package distributed: pip install 'kvoffload[dask]'"
            ) from None
        self._distributed: Any = distributed
        try:
            # A client that fails in its constructor cannot be closed; and what answers at this port may be
            # anything.
            asyncio.run(_knock(address))
            self._client: Any = self._distributed.Client(address, timeout=TIMEOUT_S, set_as_default=False)
        except Exception as error:
            # A web server's first bytes as a length are more than any machine has.
            memory = isinstance(error, MemoryError)
            reason = "what answers there is none" if memory else " ".join(str(error).split())
            raise ConfigError(
                "scheduler", address, f"a Dask scheduler that answers within {TIMEOUT_S} s ({reason})"
            ) from None
        try:
            self._check(address)
        except BaseException:
            self._client.close()
            raise

    def results(self, tasks: Sequence[Task]) -> Results:
        """As `Workers.results`."""
        sent: dict[TraceSource, Any] = {}
        futures = {}
        try:
            for task in tasks:
                if task.source not in sent:
                    sent[task.source] = self._client.scatter(load(task.source), broadcast=True)
                # Not pure: Dask must not answer from what it remembers.
                future = self._client.submit(attempt_with, sent[task.source], task, pure=False)
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
        """Disconnect. The cluster keeps running."""
        self._client.close()

    def _check(self, address: str) -> None:
        if not self._client.scheduler_info()["workers"]:
            try:
                self._client.wait_for_workers(1, timeout=TIMEOUT_S)
            except (TimeoutError, asyncio.TimeoutError):  # Two classes before Python 3.11.
                raise ConfigError("scheduler", address, "a Dask scheduler that has workers") from None
        for worker, answer in self._client.run(code_digest, on_error="return").items():
            if answer != code_digest():
                found = f"{answer}" if isinstance(answer, Exception) else "other code"
                raise ConfigError(
                    "scheduler", address, f"its workers need kvoffload {__version__}; {worker}: {found}"
                )


async def _knock(address: str) -> None:
    """Connect, shake hands and leave. Raises whatever goes wrong."""
    comm: Any = importlib.import_module("distributed.comm")
    (await comm.connect(address, timeout=TIMEOUT_S)).abort()
