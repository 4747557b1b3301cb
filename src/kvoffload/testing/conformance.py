"""The conformance suite of eviction policies, as a class that pytest runs.

    from kvoffload.testing.conformance import PolicyConformance

    class TestMine(PolicyConformance):
        policy = "examples/my_policy.py:MyPolicy"

The suite checks a policy's decisions through a manager, and reads the policy's state only to detect changes
and growth. The suite does not check that a policy keeps the *right* blocks. To check this, use `kvoffload
replay` for hit ratios, or compare the policy with a simple implementation (`PolicyConformance.twin`).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, ClassVar, TypeAlias

import pytest
from hypothesis import strategies as st

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES, LoadPlan, StorePlan
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.structures.jit import BoolArray
from kvoffload.testing.audit import audit, state_of
from kvoffload.testing.call_limit import CallLimit
from kvoffload.testing.first_steps import first_failure
from kvoffload.testing.scripts import Step, any_hints, key_of, play, random_script, scripts
from kvoffload.testing.shrink_limit import check_examples, run_machine
from kvoffload.testing.state_machine import ManagerMachine, manager_machine
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin

PolicyLike: TypeAlias = str | type[EvictionPolicy]
Check: TypeAlias = Callable[["PolicyConformance"], None]
SEEDS = range(4)
_KEY_BYTES = 20
_ROLES = ("may leave", "pinned", "in flight", "of the storing request", "damaged and pinned")


def fatal(check: Check) -> Check:
    """Decorator for a check: if it fails, later checks are skipped, because they would fail, too."""

    @wraps(check)
    def run(self: PolicyConformance) -> None:
        try:
            check(self)
        except Exception:
            type(self).failed_check = check.__name__
            raise

    return run


class PolicyConformance:
    """Base class of a policy's tests: set `policy`, and pytest runs every check on the policy.

    Cheap checks run first. If a `fatal` check fails, later checks are skipped. A random check that fails
    prints its seed. A Hypothesis check that fails is shrunk for at most 5 s of CPU time. A run takes about 10
    s of CPU time. Each check is a method; to disable a check, set it to None in your subclass.

    Attributes:
        policy: a name, ``module:Class``, ``path/to/file.py:Class``, or the class.
        twin: another policy that must make the same decisions, or None.
        admissions: admission rules to combine with the policy, ``all`` first.
        max_examples: number of Hypothesis examples in each check.
        remembers_blocks: number of new blocks after which the state of a policy with a capacity of 16 blocks
            must stop growing.
        call_cpu_s: limit, in CPU seconds, of one call of a policy that is written in Python.
        failed_check: name of the fatal check that failed; set by the suite.
    """

    policy: ClassVar[Any]
    twin: ClassVar[Any] = None
    admissions: ClassVar[tuple[str, ...]] = ("all", "reuse:2")
    max_examples: ClassVar[int] = 20
    remembers_blocks: ClassVar[int] = 4_000
    call_cpu_s: ClassVar[float] = 10.0
    failed_check: ClassVar[str] = ""

    def setup_method(self) -> None:
        """Skip the check if an earlier `fatal` check failed. Limit the CPU time of policy calls.

        Called by pytest before each check.
        """
        if failed := vars(type(self)).get("failed_check"):
            pytest.skip(f"earlier fatal fault: {failed} failed")
        self._limit = CallLimit(self.call_cpu_s)
        self._limit.begin()

    def teardown_method(self) -> None:
        """Stop limiting the CPU time of policy calls. Called by pytest after each check."""
        self._limit.end()

    # ---- form

    @fatal
    def test_it_is_found_and_says_its_name(self) -> None:
        """Check that the policy can be found by name.

        Also checks that a new policy has only numbers in `stats`, and an empty `order`.
        """
        name = POLICIES.find(self.policy).name  # refuses a class without a name or with missing methods
        policy = _manager(self.policy, 3).policy
        reported = policy.stats()
        odd = {key: value for key, value in reported.items() if not isinstance(value, (int, float))}
        assert not odd, f"stats() of {name} has values that are not numbers: {odd}"
        order = policy.order()
        assert not order, f"order() of {name} is not empty, although nothing is stored: {order}"

    # ---- safety

    @fatal
    def test_first_steps(self) -> None:
        """Check short scripts of stores, loads, failures and damage, with an audit after each step.

        Finds the worst faults in about a second: an evicted block that was protected, a leaked slot, an
        exception.
        """
        failure = first_failure(lambda capacity, store: _manager(self.policy, capacity, store))
        if failure is not None:
            raise AssertionError(str(failure))

    @fatal
    def test_protection(self) -> None:
        """Check that no store evicts a block that is pinned, in flight, or on the path of its request."""

        def check(roles: list[str], touched: list[int], offered: int) -> None:
            _check_protection(_manager(self.policy, len(roles)), roles, touched, offered)

        check_examples(
            check,
            st.lists(st.sampled_from(_ROLES), min_size=1, max_size=8),
            st.lists(st.integers(0, 7), max_size=6),
            st.integers(1, 9),
            max_examples=self.max_examples * 3,
        )

    @fatal
    def test_life_cycle(self) -> None:
        """Check every invariant of a manager at every step of random histories.

        Also checks that `order` lists exactly the resident blocks, and that a reader of the manager's events
        knows exactly the readable blocks.
        """
        lives = [("all", 1, self.max_examples // 4)]
        lives += [(admission, 5, self.max_examples // len(self.admissions)) for admission in self.admissions]
        for admission, capacity_blocks, max_examples in lives:
            machine = manager_machine(
                self.policy,
                admission,
                capacity_blocks=capacity_blocks,
                max_examples=max(1, max_examples),
                step_count=30,
            )
            _run_machine(machine)

    def test_it_takes_any_hints(self) -> None:
        """Check that arbitrary hints, at the beginning and end of requests, break nothing."""

        def check(script: list[Step], hints: list[Hints], capacity: int) -> None:
            manager = _manager(self.policy, capacity)
            play(manager, script, hints=hints)
            audit(manager)

        hints = st.lists(any_hints, min_size=1, max_size=20)
        capacities = st.sampled_from([1, 3, 8])
        check_examples(check, scripts(), hints, capacities, max_examples=self.max_examples)

    def test_every_block_can_leave(self) -> None:
        """Check after random histories that each block can be evicted when it is the only evictable block."""
        for seed in SEEDS:
            manager = _full_manager(self.policy, 7, seed)
            for last in _resident(manager):
                ctx = manager.begin_request("others", [key for key in _resident(manager) if key != last])
                plan = _store(manager, [b"f" * _KEY_BYTES], ctx)
                evicted = list(plan.evicted)
                assert evicted == [last] or plan.num_refused, (
                    f"seed {seed}: {_hex(evicted)} left, but only {last.hex()} was evictable"
                )
                manager.complete_store(plan, success=False)
                manager.complete_store(_store(manager, [last]))
                audit(manager)

    def test_asking_changes_nothing(self) -> None:
        """Check that refused stores, and queries such as `stats` and `order`, do not change the policy."""
        for seed in SEEDS:
            _check_asking(_full_manager(self.policy, 6, seed), seed)

    # ---- as a victim tier

    def test_life_as_a_victim_tier(self) -> None:
        """Check random histories of RAM as a victim tier, which stores the blocks that the device drops.

        When the device loads a block, the copy in RAM becomes a duplicate: the policy's `order` no longer
        includes it. When the device drops the block, `order` includes the copy again.
        """
        _run_machine(
            manager_machine(
                self.policy,
                store=ON_DEVICE_EVICTION,
                capacity_blocks=4,
                max_examples=max(1, self.max_examples // 2),
                step_count=30,
            )
        )

    def test_it_is_told_of_blocks_that_return(self) -> None:
        """Check the `reused` flags that a policy of a victim tier gets in `access`.

        When the device drops a block, the block's flag is True if requests used the block again while the
        device held it. If the policy's `needs_returns` is False, every flag is False.
        """
        policy_class = POLICIES.find(self.policy)
        accesses: list[tuple[bytes, bool]] = []

        class Recording(policy_class):  # type: ignore[misc, valid-type]
            def access(self, slots: SlotArray, reused: BoolArray) -> None:
                accesses.extend(zip(self.index.keys_at(slots), reused.tolist(), strict=True))
                super().access(slots, reused)

        manager = _manager(Recording, 8, ON_DEVICE_EVICTION)
        once, twice, hit, other = (key_of(number, _KEY_BYTES) for number in range(4))
        for path in ([once, twice], [twice]):  # the second is served by the device
            manager.finish_request(manager.begin_request("computes", path))
        manager.complete_store(_store(manager, [once, twice, hit]))  # the device drops these blocks
        reads = manager.begin_request("reads", [hit])
        manager.complete_load(manager.prepare_load([hit], reads))
        manager.finish_request(reads)
        manager.complete_store(_store(manager, [hit, other]))
        manager.complete_store(_store(manager, [once, twice, hit, other]))
        reused = [key for key, is_reuse in accesses if is_reuse]
        expected = [twice, hit] if policy_class.needs_returns() else []
        assert reused == expected, f"reported as used again: {_hex(reused)}, not {_hex(expected)}"
        audit(manager)

    # ---- determinism

    def test_it_decides_the_same_again(self) -> None:
        """Check that equal calls give equal decisions: no shared state, no randomness."""
        for seed in SEEDS:
            first, second = (decisions(self.policy, seed) for _ in range(2))
            assert first == second, f"seed {seed}: the second time the same calls had other decisions"

    def test_it_decides_the_same_elsewhere(self) -> None:
        """Check that decisions are equal in another process, with another hash seed.

        Skips a class that was defined inside a function, because another process cannot import it.
        """
        name = self.policy if isinstance(self.policy, str) else _address(self.policy)
        if name is not None:
            check_elsewhere([name])

    def test_reset_forgets_everything(self) -> None:
        """Check that a policy behaves like a new policy after `reset`."""
        for seed in SEEDS:
            used, new = _manager(self.policy, 6), _manager(self.policy, 6)
            play(used, random_script(seed, num_steps=200, settle=True))
            used.reset()
            audit(used)
            assert not used.policy.order(), f"seed {seed}: after reset, order() has {used.policy.order()}"
            assert used.policy.stats() == new.policy.stats(), (
                f"seed {seed}: after reset, stats() is {used.policy.stats()}, not {new.policy.stats()}"
            )
            _compare(f"seed {seed}, after reset", used, new, random_script(seed + 1000, num_steps=200))

    def test_it_decides_as_its_twin(self) -> None:
        """Compare the policy with its `twin`, if there is one, on random scripts and several capacities."""
        if self.twin is None:
            return

        def check(script: list[Step], capacity: int, store: str) -> None:
            policy, twin = (_manager(policy, capacity, store) for policy in (self.policy, self.twin))
            _compare("the twin", policy, twin, script)

        capacities, modes = st.sampled_from([1, 3, 5, 8]), st.sampled_from(STORES)
        check_examples(check, scripts(), capacities, modes, max_examples=self.max_examples * 2)
        for seed in SEEDS:
            script = random_script(seed, num_steps=300)
            _compare(f"seed {seed}, the twin", _manager(self.policy, 6), _manager(self.twin, 6), script)

    # ---- memory

    def test_memory_is_bounded(self) -> None:
        """Check that the policy stops growing in a long scan with hits, failures, damage and new hints."""
        capacity_blocks, sizes = 16, []
        manager = _manager(self.policy, capacity_blocks)
        for stretch in range(3):
            for number in range(0, self.remembers_blocks, 4):
                first = stretch * self.remembers_blocks + number
                keys = [(first + i).to_bytes(_KEY_BYTES, "big") for i in range(4)]
                for _ in range(2):  # the second request hits
                    hints = Hints(f"reason {first}", tenant=f"tenant {first}")
                    ctx = manager.begin_request("scan", keys, hints=hints)
                    plan = manager.prepare_store(keys, ctx)
                    assert plan is not None
                    manager.complete_store(plan, success=number % 48 != 0)
                    manager.finish_request(ctx)
                if number % 8 == 0:
                    manager.discard(keys[3:])
            sizes.append(len(pickle.dumps(state_of(manager.policy))) + _size_of_class(type(manager.policy)))
        audit(manager)
        # Unbounded state triples until the end. The margin allows for larger numbers in the pickle.
        assert sizes[-1] <= 1.5 * sizes[0] + 256, (
            f"the state grows without limit: {sizes} bytes after 1, 2 and 3 times {self.remembers_blocks} "
            f"new blocks, with {capacity_blocks} in the cache; if it has a larger bound, set "
            "`remembers_blocks`"
        )

    # ---- hits

    def test_it_is_never_above_the_optimum(self) -> None:
        """Check that hits do not exceed the optimum, and reach the optimum if the cache holds all blocks.

        Covers several workloads, capacities and admission rules, with and without a device cache.
        """
        for name in ("chat", "agent", "rag"):
            trace = workload(name)
            share = max(1, trace.unique_blocks // 33)
            configs = [ReplayConfig(c, self.policy) for c in (1, share, trace.unique_blocks // 5)]
            configs += [ReplayConfig(share, self.policy, admission) for admission in self.admissions[1:]]
            configs.append(ReplayConfig(2 * share, self.policy, "all", device_blocks=share))
            configs.append(ReplayConfig(trace.unique_blocks, self.policy))
            for config in configs:
                replay = Replay(trace, config)
                report = replay.run()
                audit(replay.manager)
                ratio, best = report.prefix_hit_ratio, report.optimum_hit_ratio
                assert ratio <= best, f"{name}, {config}: hit ratio {ratio} is above the optimum {best}"
            unlimited = report.infinite_hit_ratio
            assert ratio == unlimited, f"{name}: hit ratio {ratio} with room for all, not {unlimited}"


def decisions(policy: PolicyLike, seed: int) -> list[Any]:
    """Return the decisions, `stats` and `order` of a policy on `random_script`, step by step."""
    hints = (Hints("tool_calls"), Hints("stop", tenant="me"), Hints(priority=1))
    return play(_manager(policy, 6), random_script(seed, num_steps=250), _reported, hints)


def digest(log: Sequence[Any]) -> str:
    return hashlib.sha256(repr(log).encode()).hexdigest()


@cache
def workload(name: str) -> Trace:
    """Generate a small trace of a built-in workload."""
    sessions = {"chat": 60, "agent": 2, "rag": 80}[name]
    return generate(builtin(name, sessions=sessions, block_tokens=1024))


def _manager(policy: PolicyLike, capacity_blocks: int, store: str = ON_COMPUTE) -> OffloadingManager:
    return OffloadingManager(capacity_blocks, key_bytes=_KEY_BYTES, policy=policy, store=store)


def _full_manager(policy: PolicyLike, capacity_blocks: int, seed: int) -> OffloadingManager:
    """Create a manager with a random history, no free slot, and only ready, unpinned blocks."""
    manager = _manager(policy, capacity_blocks)
    play(manager, random_script(seed, num_steps=150, settle=True))
    for number in range(100, 100 + manager.stats().free):
        manager.complete_store(_store(manager, [key_of(number, _KEY_BYTES)]))
    return manager


def _reported(manager: OffloadingManager) -> tuple[dict[str, float], list[int] | None]:
    return manager.policy.stats(), manager.policy.order()


def _resident(manager: OffloadingManager) -> list[bytes]:
    return list(manager.index.keys_at((manager.slots.ref_cnt == 0).nonzero()[0]))


def _store(manager: OffloadingManager, keys: list[bytes], ctx: RequestContext | None = None) -> StorePlan:
    plan = manager.prepare_store(keys, ctx)
    assert plan is not None, f"no room for {_hex(keys)}"
    return plan


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _compare(label: str, manager: OffloadingManager, twin: OffloadingManager, script: list[Step]) -> None:
    for number, (actual, expected) in enumerate(zip(play(manager, script), play(twin, script), strict=True)):
        assert actual == expected, (
            f"{label}: step {number} {_short(script[number])}: {_short(actual[:2])}, "
            f"not {_short(expected[:2])}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]} ..."


def _run_machine(machine: type[ManagerMachine]) -> None:
    """Run a state machine. The message of a failure lists the steps, then the violated invariant."""
    try:
        run_machine(machine)
    except Exception as error:
        checks = [f"state.{check.function.__name__}()" for check in machine().invariants]
        lines = "\n".join(getattr(error, "__notes__", ())).splitlines()
        steps = [line for line in lines if line.strip() not in checks]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError("\n".join([*steps, f"{kind}{error}"])) from None


def _size_of_class(policy: type) -> int:
    """Estimate the size of a policy's mutable class attributes: the length of their `repr`."""
    values = [
        value
        for cls in policy.__mro__
        if cls.__module__ not in ("builtins", "abc", EvictionPolicy.__module__)
        for name, value in vars(cls).items()
        if isinstance(value, (dict, list, set, bytearray, deque)) and not name.startswith("__")
    ]
    return sum(len(repr(value)) for value in values)


def _check_protection(manager: OffloadingManager, roles: list[str], touched: list[int], offered: int) -> None:
    """Fill a cache with a block for each role, offer new blocks, and check that protected blocks stay."""
    keys = [key_of(number, _KEY_BYTES) for number in range(len(roles))]
    for key, role in zip(keys, roles, strict=True):
        entering = _store(manager, [key])
        if role != "in flight":
            manager.complete_store(entering)
    for number in touched:
        manager.touch([keys[number % len(keys)]])
    for key, role in zip(keys, roles, strict=True):
        if "pinned" in role:
            manager.prepare_load([key])
        if "damaged" in role:
            manager.discard([key])
    own = [key for key, role in zip(keys, roles, strict=True) if role == "of the storing request"]
    may_leave = {key for key, role in zip(keys, roles, strict=True) if role == "may leave"}
    ctx = manager.begin_request("stores", own)
    try:
        plan = manager.prepare_store([key_of(100 + i, _KEY_BYTES) for i in range(offered)], ctx)
    except PolicyError as error:
        raise AssertionError(f"{error}; the blocks in slots 0, 1, ... are {roles}") from error
    audit(manager)
    evicted = list(plan.evicted) if plan is not None else []
    wrong = set(evicted) - may_leave
    assert not wrong, f"{_hex([*wrong])} left, although protected; roles: {roles}"
    wanted = min(offered, len(may_leave)) - (plan.num_refused if plan is not None else 0)
    assert len(evicted) >= wanted, f"{len(evicted)} of {wanted} blocks left; roles: {roles}"


def _check_asking(manager: OffloadingManager, seed: int) -> None:
    """Check that neither a query of a full manager nor a refused store changes the policy."""
    resident = _resident(manager)
    absent = [key_of(number, _KEY_BYTES) for number in range(240, 245)]
    own = manager.begin_request("whole cache", resident)
    pins: list[LoadPlan] = []
    asking: dict[str, Callable[[], Any]] = {
        "stats()": manager.policy.stats,
        "order()": manager.policy.order,
        "lookup": lambda: manager.lookup(resident + absent),
        "lookup_key": lambda: [manager.lookup_key(key) for key in resident + absent],
        "a refusal: all blocks are of this request": lambda: manager.prepare_store(absent, own),
        "prepare_load": lambda: pins.append(manager.prepare_load(resident)),
        "a refusal: all blocks are pinned": lambda: manager.prepare_store(absent),
        "complete_load": lambda: manager.complete_load(pins.pop()),
    }
    before = state_of(manager.policy)
    for query, ask in asking.items():
        answer = ask()
        assert state_of(manager.policy) == before, f"seed {seed}: {query} changed the policy"
        assert "refusal" not in query or answer is None, f"seed {seed}: {query}, but it was not refused"


def _address(policy: type[EvictionPolicy]) -> str | None:
    """Return a name by which another process can import this class; None if there is no such name."""
    if "." in policy.__qualname__:
        return None
    if policy.__module__.startswith("kvoffload."):
        return f"{policy.__module__}:{policy.__qualname__}"
    path = inspect.getsourcefile(policy)
    return f"{path}:{policy.__qualname__}" if path else None


def check_elsewhere(names: Sequence[str]) -> None:
    """Compare the decisions of these policies with the decisions in a process with another hash seed."""
    code = (
        "from kvoffload.testing.conformance import decisions, digest\n"
        f"for name in {list(names)!r}: print(digest(decisions(name, 0)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"in another process: {done.stderr}"
    for name, elsewhere in zip(names, done.stdout.split(), strict=True):
        assert elsewhere == digest(decisions(name, 0)), (
            f"{name}, seed 0: decided differently in another process"
        )
