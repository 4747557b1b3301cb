"""Conformance of eviction policies: what every policy must do, ours or yours, as a class that pytest runs.

    from kvoffload.testing.conformance import PolicyConformance

    class TestMine(PolicyConformance):
        policy = "examples/my_policy.py:MyPolicy"

Knows no policy. It checks a policy's decisions through a manager, and reads its state only to see whether it
changes or grows. Whether it keeps the *right* blocks is not checked here: use `kvoffload replay` for hit
ratios, and `PolicyConformance.twin` to compare it with a twin of yours.
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
from functools import cache
from typing import Any, ClassVar, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES, LoadPlan, StorePlan
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.errors import PolicyError
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.structures.jit import BoolArray
from kvoffload.testing.audit import audit, state_of
from kvoffload.testing.call_limit import CallLimit
from kvoffload.testing.machine import ManagerMachine, manager_machine
from kvoffload.testing.scripts import Step, key_of, known_of_requests, play, random_script, scripts
from kvoffload.traces.sessions import generate
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin

PolicyLike: TypeAlias = str | type[EvictionPolicy]
SEEDS = range(4)
_KEY_BYTES = 20
_ROLES = ("may leave", "pinned", "in flight", "of the storing request", "damaged and pinned")


class PolicyConformance:
    """Derive a class from it, set `policy`, and pytest runs every check on it.

    A failure says what happened; random checks print their seed, or are shrunk by Hypothesis. Takes a few
    seconds for a policy. Override checks that do not fit: each is a method of its own.

    Attributes:
        policy: a name, ``module:Class``, ``path/to/file.py:Class``, or the class.
        twin: another policy that must make the same decisions, if there is one.
        admissions: rules that it is tested with, ``all`` first.
        max_examples: examples that Hypothesis tries in each check.
        remembers_blocks: number of fresh blocks after which the state of a policy of 16 blocks does not grow.
        call_cpu_s: CPU time that one call of a policy in Python may take.
    """

    policy: ClassVar[Any]
    twin: ClassVar[Any] = None
    admissions: ClassVar[tuple[str, ...]] = ("all", "reuse:2")
    max_examples: ClassVar[int] = 20
    remembers_blocks: ClassVar[int] = 4_000
    call_cpu_s: ClassVar[float] = 10.0

    def setup_method(self) -> None:
        """Called by pytest before each check: calls of policies get a limit."""
        self._limit = CallLimit(self.call_cpu_s)
        self._limit.begin()

    def teardown_method(self) -> None:
        """Called by pytest after each check."""
        self._limit.end()

    # ---- what it is

    def test_it_is_found_and_says_its_name(self) -> None:
        """The manager finds it, it has a name for reports; `stats` and `order` have the specified form."""
        found = POLICIES.find(self.policy)
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        assert not missing, f"{found.__name__} does not implement {', '.join(missing)}"
        name = getattr(found, "name", None)
        assert isinstance(name, str), f"{found.__name__} has no `name`"
        assert name, f"the name of {found.__name__} is empty"
        policy = _manager(self.policy, 3).policy
        reported = policy.stats()
        odd = {key: value for key, value in reported.items() if not isinstance(value, (int, float))}
        assert not odd, f"stats() of {name}: these are not numbers: {odd}"
        order = policy.order()
        assert not order, f"order() of {name} has slots, and nothing is stored: {order}"

    # ---- what may never happen

    def test_life_cycle(self) -> None:
        """Every invariant of a manager holds at every step of the lives that a state machine generates.

        Also: the policy's `order` has exactly the resident blocks, and the events give the readable blocks.
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

    def test_protection(self) -> None:
        """Only blocks that may leave do: none that is pinned, in flight, or of the storing request."""

        @settings(max_examples=self.max_examples * 3, deadline=None)
        @given(
            st.lists(st.sampled_from(_ROLES), min_size=1, max_size=8),
            st.lists(st.integers(0, 7), max_size=6),
            st.integers(1, 9),
        )
        def check(roles: list[str], touched: list[int], offered: int) -> None:
            _check_protection(_manager(self.policy, len(roles)), roles, touched, offered)

        check()

    def test_it_takes_any_hints(self) -> None:
        """Whatever an engine says of requests, when they begin and when they end, nothing breaks."""

        @settings(max_examples=self.max_examples, deadline=None)
        @given(scripts(), st.lists(known_of_requests, min_size=1, max_size=20), st.sampled_from([1, 3, 8]))
        def check(script: list[Step], hints: list[Hints], capacity: int) -> None:
            manager = _manager(self.policy, capacity)
            play(manager, script, hints=hints)
            audit(manager)

        check()

    def test_every_block_can_leave(self) -> None:
        """The only block that may leave is found, whatever happened before: the policy loses none."""
        for seed in SEEDS:
            manager = _full_manager(self.policy, 7, seed)
            for last in _resident(manager):
                ctx = manager.begin_request("others", [key for key in _resident(manager) if key != last])
                plan = _store(manager, [b"f" * _KEY_BYTES], ctx)
                left = list(plan.evicted)
                assert left == [last] or plan.num_refused, (
                    f"seed {seed}: {_hex(left)} left, only {last.hex()} could"
                )
                manager.complete_store(plan, success=False)
                manager.complete_store(_store(manager, [last]))
                audit(manager)

    def test_asking_changes_nothing(self) -> None:
        """Neither a refusal nor a query changes the policy; `stats` and `order` are queries too."""
        for seed in SEEDS:
            _check_asking(_full_manager(self.policy, 6, seed), seed)

    # ---- as a victim tier

    def test_life_as_a_victim_tier(self) -> None:
        """As `test_life_cycle`, where blocks leave the order when the device holds them, and return."""
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
        """Of blocks that the device drops, `access` says which were used again, and of no others.

        A policy that observes all traffic, or to which uses do not count, is told of none.
        """
        found = POLICIES.find(self.policy)
        told: list[tuple[bytes, bool]] = []

        class Listening(found):  # type: ignore[misc, valid-type]
            def access(self, slots: SlotArray, reused: BoolArray) -> None:
                told.extend(zip(self.index.keys_at(slots), reused.tolist(), strict=True))
                super().access(slots, reused)

        manager = _manager(Listening, 8, ON_DEVICE_EVICTION)
        once, twice, hit, other = (key_of(number, _KEY_BYTES) for number in range(4))
        for path in ([once, twice], [twice]):  # the second is served by the device
            manager.finish_request(manager.begin_request("computes", path))
        _drop(manager, [once, twice, hit])
        reads = manager.begin_request("reads", [hit])
        manager.complete_load(manager.prepare_load([hit], reads))
        manager.finish_request(reads)
        _drop(manager, [hit, other])
        _drop(manager, [once, twice, hit, other])
        reused = [key for key, is_reuse in told if is_reuse]
        expected = [twice, hit] if found.is_told_of_returns() else []
        assert reused == expected, f"told that these were used again: {_hex(reused)}, not {_hex(expected)}"
        audit(manager)

    # ---- what it does again

    def test_it_decides_the_same_again(self) -> None:
        """Equal calls, equal decisions: instances share no state, and nothing is random."""
        for seed in SEEDS:
            once, again = (decisions(self.policy, seed) for _ in range(2))
            assert once == again, f"seed {seed}: the second time the same calls had other decisions"

    def test_it_decides_the_same_elsewhere(self) -> None:
        """Also in another process, where hashes of bytes differ, and so does the order of a set of keys.

        A class that was made inside a function cannot be found there, and is not checked.
        """
        name = self.policy if isinstance(self.policy, str) else _address(self.policy)
        if name is not None:
            check_elsewhere([name])

    def test_reset_forgets_everything(self) -> None:
        """After `reset` a policy decides, counts and orders as a new one does."""
        for seed in SEEDS:
            used, new = _manager(self.policy, 6), _manager(self.policy, 6)
            play(used, random_script(seed, num_steps=200, settle=True))
            used.reset()
            audit(used)
            assert not used.policy.order(), f"seed {seed}: after reset, order() has {used.policy.order()}"
            assert used.policy.stats() == new.policy.stats(), (
                f"seed {seed}: after reset, stats() says {used.policy.stats()}, new {new.policy.stats()}"
            )
            _compare(f"seed {seed}, after reset", used, new, random_script(seed + 1000, num_steps=200))

    def test_it_decides_as_its_twin(self) -> None:
        """Step by step, on random scripts, at several capacities. Does nothing without a `twin`."""
        if self.twin is None:
            return

        @settings(max_examples=self.max_examples * 2, deadline=None)
        @given(scripts(), st.sampled_from([1, 3, 5, 8]), st.sampled_from(STORES))
        def check(script: list[Step], capacity: int, store: str) -> None:
            policy, twin = (_manager(one, capacity, store) for one in (self.policy, self.twin))
            _compare("the twin", policy, twin, script)

        check()
        for seed in SEEDS:
            script = random_script(seed, num_steps=300)
            _compare(f"seed {seed}, the twin", _manager(self.policy, 6), _manager(self.twin, 6), script)

    # ---- how much it remembers

    def test_memory_is_bounded(self) -> None:
        """A long scan, with hits, failures, damage and new words, does not make the policy grow for ever."""
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
        # Unbounded state is three times as large at the end; larger numbers may take a few bytes more.
        assert sizes[-1] <= 1.5 * sizes[0] + 256, (
            f"the state grows for ever: {sizes} bytes after 1, 2 and 3 times {self.remembers_blocks} "
            f"fresh blocks, with {capacity_blocks} in the cache; if it is bounded and the bound is larger, "
            "set `remembers_blocks`"
        )

    # ---- what it is worth

    def test_it_is_never_above_the_optimum(self) -> None:
        """On several workloads, capacities and admission rules, without and behind a device cache.

        More hits than the optimum means false hits. With room for everything, every block misses exactly
        once.
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
                assert ratio <= best, f"{name}, {config}: hit ratio {ratio}, the optimum has {best}"
            everything = report.infinite_hit_ratio
            assert ratio == everything, f"{name}: hit ratio {ratio} with room for all, not {everything}"


def decisions(policy: PolicyLike, seed: int) -> list[Any]:
    """The decisions, `stats` and `order` of a policy on `random_script`, step by step."""
    said = (Hints("tool_calls"), Hints("stop", tenant="me"), Hints(priority=1))
    return play(_manager(policy, 6), random_script(seed, num_steps=250), _reported, said)


def digest(log: Sequence[Any]) -> str:
    """One line for a log of decisions."""
    return hashlib.sha256(repr(log).encode()).hexdigest()


@cache
def workload(name: str) -> Trace:
    """A small trace of a built-in workload."""
    sessions = {"chat": 60, "agent": 2, "rag": 80}[name]
    return generate(builtin(name, sessions=sessions, block_tokens=1024))


def _manager(policy: PolicyLike, capacity_blocks: int, store: str = ON_COMPUTE) -> OffloadingManager:
    return OffloadingManager(capacity_blocks, key_bytes=_KEY_BYTES, policy=policy, store=store)


def _drop(manager: OffloadingManager, keys: list[bytes]) -> None:
    """The device drops blocks."""
    plan = manager.prepare_store(keys)
    assert plan is not None, f"no room for {_hex(keys)}"
    manager.complete_store(plan)


def _full_manager(policy: PolicyLike, capacity_blocks: int, seed: int) -> OffloadingManager:
    """A used manager whose blocks are all ready and unpinned, and which has no free slot."""
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


def _compare(what: str, one: OffloadingManager, other: OffloadingManager, script: list[Step]) -> None:
    for number, (left, right) in enumerate(zip(play(one, script), play(other, script), strict=True)):
        assert left == right, (
            f"{what}: step {number} {_short(script[number])}: {_short(left[:2])}, not {_short(right[:2])}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]} ..."


def _run_machine(machine: type[ManagerMachine]) -> None:
    """Run a state machine. Of a failure the steps come first, and what is wrong last."""
    try:
        run_state_machine_as_test(machine, settings=machine.TestCase.settings)
    except Exception as error:
        checks = [f"state.{check.function.__name__}()" for check in machine().invariants]
        lines = "\n".join(getattr(error, "__notes__", ())).splitlines()
        steps = [line for line in lines if line.strip() not in checks]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError("\n".join([*steps, f"{kind}{error}"])) from None


def _size_of_class(policy: type) -> int:
    """Bytes of what a policy keeps in attributes of its class, where all of its instances share it."""
    held = [
        value
        for cls in policy.__mro__
        if cls.__module__ not in ("builtins", "abc", EvictionPolicy.__module__)
        for name, value in vars(cls).items()
        if isinstance(value, (dict, list, set, bytearray, deque)) and not name.startswith("__")
    ]
    return sum(len(repr(value)) for value in held)


def _check_protection(manager: OffloadingManager, roles: list[str], touched: list[int], offered: int) -> None:
    """Fill a cache with blocks in these roles, offer as many new ones, and check which leave."""
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
    left = list(plan.evicted) if plan is not None else []
    wrong = set(left) - may_leave
    assert not wrong, f"{_hex([*wrong])} left, which may not; roles: {roles}"
    wanted = min(offered, len(may_leave)) - (plan.num_refused if plan is not None else 0)
    assert len(left) >= wanted, f"{len(left)} of {wanted} blocks left; roles: {roles}"


def _check_asking(manager: OffloadingManager, seed: int) -> None:
    """Make every query and a refusal on a full manager; the policy must not change."""
    here = _resident(manager)
    fresh = [key_of(number, _KEY_BYTES) for number in range(240, 245)]
    own = manager.begin_request("of everybody", here)
    pins: list[LoadPlan] = []
    asking: dict[str, Callable[[], Any]] = {
        "stats()": manager.policy.stats,
        "order()": manager.policy.order,
        "lookup": lambda: manager.lookup(here + fresh),
        "lookup_key": lambda: [manager.lookup_key(key) for key in here + fresh],
        "a refusal: everything is of this request": lambda: manager.prepare_store(fresh, own),
        "prepare_load": lambda: pins.append(manager.prepare_load(here)),
        "a refusal: everything is pinned": lambda: manager.prepare_store(fresh),
        "complete_load": lambda: manager.complete_load(pins.pop()),
    }
    before = state_of(manager.policy)
    for what, ask in asking.items():
        answer = ask()
        assert state_of(manager.policy) == before, f"seed {seed}: {what} changed the policy"
        assert "refusal" not in what or answer is None, f"seed {seed}: {what}, but it was not refused"


def _address(policy: type[EvictionPolicy]) -> str | None:
    """The name by which another process finds this class; None if it cannot."""
    if "." in policy.__qualname__:
        return None
    if policy.__module__.startswith("kvoffload."):
        return f"{policy.__module__}:{policy.__qualname__}"
    path = inspect.getsourcefile(policy)
    return f"{path}:{policy.__qualname__}" if path else None


def check_elsewhere(names: Sequence[str]) -> None:
    """Compare the decisions of these policies with those in a fresh process with other hashes."""
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
