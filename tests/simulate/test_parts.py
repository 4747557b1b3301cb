"""Parts of a timed replay: events, links, the device's pool, arrivals and machines, computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvoffload.errors import ConfigError
from kvoffload.simulate.arrivals import AtOnce, Recorded, session_times_s
from kvoffload.simulate.classes import CLASSES, machine_of_class, parse_class
from kvoffload.simulate.config import Timing
from kvoffload.simulate.event_queue import Events, Link
from kvoffload.simulate.machine import Machine, Quantity, read_machine
from kvoffload.simulate.pool import DevicePool, Lease
from kvoffload.simulate.report import Distribution, LinkReport
from support.simulated_machine import machine, trace_of

# ---- events and links


def test_events_are_ordered_by_time_and_then_by_announcement() -> None:
    events, order = Events(), list[Any]()
    for when, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        events.at(when, lambda name=name: order.append((events.now, name)))  # type: ignore[misc]
    events.at(1.5, lambda: events.at(0.0, lambda: order.append((events.now, "what is past happens now"))))
    events.run()
    assert order == [(1.0, "a"), (1.5, "what is past happens now"), (2.0, "b"), (2.0, "c")]


def test_a_link_moves_one_job_after_the_other() -> None:
    events, ended = Events(), list[float]()
    link = Link(events, "load", bytes_per_s=100.0, latency_s=0.5)
    for num_bytes in (100, 200):
        link.submit(num_bytes, lambda: ended.append(events.now))
    events.at(5.0, lambda: link.submit(100, lambda: ended.append(events.now)))
    events.at(5.5, lambda: reports.append(link.report()))
    reports: list[Any] = []
    events.run()
    assert ended == [1.5, 4.0, 6.5]
    (half,) = reports
    assert (half.jobs, half.bytes_moved, half.bytes_left, half.most_bytes_waiting) == (3, 300, 100, 300)
    assert half.busy_s == pytest.approx(4.5)
    assert half.waited_s == pytest.approx(1.5)
    assert link.report().bytes_left == 0


def test_a_link_whose_first_job_has_just_begun_was_never_busy() -> None:
    events, reports = Events(), list[LinkReport]()
    link = Link(events, "store", bytes_per_s=1000.0, latency_s=0.0)
    events.at(1.1, lambda: link.submit(100, lambda: None))
    events.at(1.1, lambda: reports.append(link.report()))
    events.run()
    (report,) = reports
    assert 1.1 + 0.1 - 1.1 > 0.1, "the numbers of this test round up"
    assert (report.busy_s, report.busy_share) == (0.0, 0.0)


# ---- the device's pool


def leased(pool: DevicePool, codes: list[int], num_found: int = 0) -> Lease:
    lease = pool.lease(codes[:num_found], len(codes) - num_found)
    assert lease is not None
    pool.take(lease, len(codes) - num_found)
    pool.know(lease, codes[num_found:])
    return lease


def test_free_blocks_leave_by_last_use_and_the_tail_first() -> None:
    pool = DevicePool(6)
    first, second = leased(pool, [1, 2]), leased(pool, [3, 4])
    pool.release(second)
    pool.release(first)
    assert pool.next_to_leave(6) == [4, 3, 2, 1]
    assert pool.next_to_leave(4) == [4, 3]  # two blank blocks go first
    lease = pool.lease([], 5)
    assert lease is not None
    assert pool.take(lease, 5) == [4, 3, 2]
    assert [pool.find([code]) for code in (1, 2, 3)] == [1, 0, 0]


def test_held_blocks_are_not_evicted() -> None:
    pool = DevicePool(4)
    pool.release(leased(pool, [1, 2]))
    again = leased(pool, [1, 2, 3], num_found=2)
    assert pool.lease([], 2) is None
    assert pool.num_available == 1
    pool.release(again)
    assert pool.num_available == 4


def test_reserved_blocks_are_not_leased_twice() -> None:
    pool = DevicePool(4)
    pool.release(leased(pool, [1, 2]))
    growing = pool.lease([1], 2)
    assert growing is not None
    assert pool.lease([], 2) is None
    # A block that is free and found counts once.
    assert pool.lease([2], 1) is None
    assert pool.take(growing, 2) == []
    pool.release(growing)
    assert pool.lease([], 4) is not None


def test_a_second_copy_is_blank_when_released_and_the_first_is_recent() -> None:
    pool = DevicePool(5)
    pool.release(leased(pool, [1, 2]))
    pool.release(leased(pool, [3]))
    copy = leased(pool, [1, 2], num_found=1)  # computes block 2 again
    pool.release(copy)
    assert pool.next_to_leave(5) == [3, 2, 1]
    assert pool.num_available == 5


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 2), st.integers(0, 3)), max_size=40
    )
)
def test_no_block_is_lost_or_counted_twice(steps: list[tuple[list[int], int, int]]) -> None:
    """Requests find some blocks, compute the others later, and finally generate a block."""
    pool, held, growing = DevicePool(12), list[Lease](), list[tuple[Lease, list[int]]]()
    for codes, num_grown, num_ended in steps:
        chain = list(dict.fromkeys(codes))
        num_found = min(pool.find(chain), max(0, len(chain) - 1))
        lease = pool.lease(chain[:num_found], len(chain) - num_found + 1)
        if lease is not None:
            held.append(lease)
            growing.append((lease, chain[num_found:]))
        for _ in range(min(num_grown, len(growing))):
            grown, blocks = growing.pop(0)
            pool.take(grown, len(blocks))
            pool.know(grown, blocks)
            pool.take(grown, 1)
        for _ in range(min(num_ended, len(held) - len(growing))):
            pool.release(held.pop(0))
        in_use = {code for lease in held for code in lease.known if code not in lease.copies}
        assert pool.num_available == 12 - len(in_use) - sum(lease.num_blank for lease in held)
        assert not in_use & set(pool.next_to_leave(12))
        assert all(pool.find([code]) for code in in_use)
    for ended in held:
        pool.release(ended)
    assert pool.num_available == 12
    assert pool.lease([], 12) is not None


# ---- arrivals


def test_load_moves_sessions_together_without_changing_them() -> None:
    trace = trace_of((10, "ab"), (20, "abc"), (30, "x"), (31, "xy"), (50, "z"))
    assert session_times_s(trace, 1.0).tolist() == [0, 10, 20, 21, 40]
    assert session_times_s(trace, 2.0).tolist() == [0, 10, 10, 11, 20]
    assert session_times_s(trace, 0.5).tolist() == [0, 10, 40, 41, 80]


def test_a_next_turn_arrives_after_the_end_of_the_previous_turn() -> None:
    events, came = Events(), list[Any]()
    arrivals = Recorded(trace_of((0, "ab"), (1, "abc"), (2, "x"), (30, "abcd")), load=1.0)

    def arrive(request: int) -> None:
        came.append((events.now, request))
        events.at(events.now + 5.0, lambda: arrivals.ended(request))

    arrivals.begin(events, arrive)
    events.run()
    assert came == [(0.0, 0), (2.0, 2), (5.0, 1), (30.0, 3)]


def test_at_once_limits_the_running_requests() -> None:
    events, came = Events(), list[Any]()
    arrivals = AtOnce(trace_of(*((9, letter) for letter in "abcde")), 2)

    def arrive(request: int) -> None:
        came.append((events.now, request))
        events.at(events.now + 1.0 + request, lambda: arrivals.ended(request))

    arrivals.begin(events, arrive)
    events.run()
    assert came == [(0.0, 0), (0.0, 1), (1.0, 2), (2.0, 3), (4.0, 4)]


# ---- machines


def test_a_prompt_in_chunks_takes_as_long_as_in_one_step() -> None:
    slow = machine(prefill_s_per_token=0.5, prefill_s_per_token_squared=0.25)
    assert slow.prefill_s(0, 10) == pytest.approx(5 + 25)
    assert slow.prefill_s(0, 4) + slow.prefill_s(4, 10) == pytest.approx(slow.prefill_s(0, 10))


@pytest.mark.parametrize("squared", [0.0, 1e-3])
@pytest.mark.parametrize("from_disk", [False, True])
def test_at_break_even_loading_takes_as_long_as_computing(squared: float, from_disk: bool) -> None:
    slow = machine(prefill_s_per_token_squared=squared, copy_latency_s=2.0, disk_read_latency_s=1.0)
    tokens = slow.break_even_tokens(10.0, from_disk=from_disk)
    loading_s = 2.0 + tokens / 100 + (1.0 + tokens / 100 if from_disk else 0.0)
    assert slow.prefill_s(0, 1) > 0
    assert 0.1 * tokens + squared * tokens**2 == pytest.approx(loading_s)


def test_a_slow_link_breaks_even_only_with_attention() -> None:
    assert machine(load_bytes_per_s=50.0).break_even_tokens(10.0) == math.inf
    dearer = machine(load_bytes_per_s=50.0, prefill_s_per_token_squared=1e-3)
    assert dearer.break_even_tokens(10.0) == pytest.approx(100.0)


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(machine().to_json())
    assert read_machine(path) == machine()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a file of"),
        ('{"name": "x", "format": "something else"}', "something else"),
        ('{"name": "x", "step_s": {"value": -1, "p10": 0, "p90": 0, "source": ""}}', "machine.step_s: -1"),
        (
            '{"name": "x", "load_bytes_per_s": {"value": 0, "p10": 0, "p90": 0, "source": ""}}',
            "machine.load_bytes_per_s: 0",
        ),
    ],
)
def test_an_invalid_machine_file_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_machine(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(tmp_path / "not there.json")


def test_missing_quantities_are_named_or_taken_from_a_class() -> None:
    measured = Machine(name="mine", load_bytes_per_s=Quantity(5.0, 4.0, 6.0, "measured: here"))
    with pytest.raises(ConfigError, match=r"machine: 'mine'.*prefill_s_per_token.*--url"):
        measured.check(has_ram=True, has_disk=False)
    filled = measured.filled_from(machine_of_class("l4"))
    filled.check(has_ram=True, has_disk=True)
    assert filled.load_bytes_per_s == measured.load_bytes_per_s
    assert filled.name == "mine"


def test_every_class_is_complete_and_names_its_assumptions() -> None:
    for name in CLASSES:
        parsed = parse_class(name)
        parsed.check(has_ram=True, has_disk=True)
        sources = [
            getattr(parsed, field).source for field in ("step_s", "load_bytes_per_s", "disk_read_latency_s")
        ]
        assert all(source.startswith("assumed: ") for source in sources)
        # Loading from RAM breaks even at short prompts: 128 KiB per token, 8B parameters.
        assert parsed.break_even_tokens(128 * 1024) < 1000


def test_the_page_has_every_class_with_its_numbers() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "time.md").read_text()
    for name, kind in CLASSES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2] == kind.gpu
        assert float(cells[3].split()[0].replace(",", "")) == kind.flops_per_s / 1e12
        assert float(cells[4].split()[0]) == pytest.approx(kind.memory_bytes_per_s / 1e12, abs=0.005)
        assert cells[5] == f"{kind.link}, {kind.link_bytes_per_s / 1e9:g} GB/s"


def test_a_larger_model_is_slower() -> None:
    small, large = parse_class("h100-pcie5"), parse_class("h100-pcie5:70B")
    assert large.value("prefill_s_per_token") == pytest.approx(8.75 * small.value("prefill_s_per_token"))
    assert 4.9 < large.prefill_s(0, 10**7) / small.prefill_s(0, 10**7) < 8.75


@pytest.mark.parametrize("text", ["h100", "h100-pcie5:0B", "h100-pcie5:70", "", "../x"])
def test_an_unknown_class_names_the_known_classes(text: str) -> None:
    with pytest.raises(ConfigError, match="h100-pcie5, h200-pcie5"):
        parse_class(text)


def test_all_invalid_timings_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        Timing(machine(), 0, max_running=0, step_tokens=-1, load=math.nan, at_once=-1, deadline_s=0)
    for field in ("block_bytes", "max_running", "step_tokens", "load", "at_once", "deadline_s"):
        assert f"{field}: " in str(error.value)
    with pytest.raises(ConfigError, match="set load or at_once"):
        Timing(machine(), 1, load=2.0, at_once=3)


def test_percentiles_are_observed_values() -> None:
    distribution = Distribution.of(np.arange(1.0, 11.0))
    assert (distribution.mean, distribution.p50, distribution.p90, distribution.p99) == (5.5, 5.0, 9.0, 10.0)
    assert Distribution.of(np.zeros(0)) == Distribution(0.0, 0.0, 0.0, 0.0)
