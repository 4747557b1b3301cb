"""Plans with shared cache servers: hits by hand, replays of all engines, infeasible rows, and waits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.plan.evidence import gather
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.plan.plan import Plan, PlanAnswer
from kvoffload.plan.prices import Ram, Server, as_toml
from kvoffload.plan.rows import Setup, difference
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Target
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.instances import SharedReplay
from kvoffload.structures.draws import whole_numbers
from kvoffload.sweep.measuring import Progress, Work
from kvoffload.sweep.task import TraceSource
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.load import at_load
from kvoffload.traces.sources import load_trace
from support.plan_rows import MIB, PLAIN, drives, fleet, line, planned, prices, words, written
from support.run_cli import kvoffload
from support.shared_plans import NOTHING_IN, REQUESTS, STEP_S, asked_twice, by_hand, row_of, server
from support.simulated_machine import machine


def two(of_server: Server | None = None, ram: Ram | None = None, **others: Any) -> Fleet:
    """Two engines with GPUs of 5 blocks each, random routing."""
    ram = ram or Ram(module="10MiB", price=100, slots=4)
    options = {"gpus": 2, "replicas": 2, "routing": "random", **others}
    return fleet(prices(ram, server=of_server or server()), **options)


# ---- by hand


def test_servers_save_blocks_of_other_engines(twice: str) -> None:
    again, duration_s = asked_twice()[1], (REQUESTS - 1) * STEP_S
    assert 60 < again < 100
    answer = planned(twice, two(), of_ceiling=1.0)
    row = answer.chosen
    assert row.purchase == Purchase(1, 0, 1)
    assert (row.price, row.server_bytes, row.server_blocks) == (150, 1024 * MIB, int(1024 / 1.03))
    assert row.saved == row.by_servers == answer.ceiling == again / REQUESTS
    assert row.by_gpus == row.by_ram == row.by_ssds == answer.ceiling_apart == answer.by_gpus == 0
    # Repeated prompts are read; each different prompt is written once.
    assert row.server_read_bytes_per_s == pytest.approx(2 * again * MIB / duration_s)
    assert row.server_write_bytes_per_s == pytest.approx(2 * (REQUESTS - again) * MIB / duration_s)
    assert row.ssd_write_bytes_per_s is row.drive_writes_a_day is None
    share = f"{100 * again / REQUESTS:.1f}%"
    begin = f"Buy 10 MiB of RAM and a cache server of 1 GiB for 150 USD: it saves {share} of the prefill"
    assert answer.words[0].startswith(begin)
    assert answer.words[0].endswith(f"0.0% by RAM, {share} by servers.")
    use = "That is 1 module of 10MiB in the host, and a cache server of 1 GiB that all 2 engines share."
    assert use in words(answer)
    (sharing,) = [sentence for sentence in answer.words if sentence.startswith("Without servers: ")]
    less = f"10 MiB of RAM for 100 USD would save 0.0%, {100 * again / REQUESTS:.1f} points less "
    assert sharing.startswith(f"Without servers: {less}")
    assert sharing.endswith(("is above 0).", "slowly)."))
    most = (
        f"No cache saves more than {share} (the ceiling), and no cache of a single engine more than 0.0%: the"
    )
    assert most in words(answer)


def test_servers_are_timed_with_all_engines(twice: str) -> None:
    again = asked_twice()[1]
    rates = ("load_bytes_per_s", "store_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    speeds = {"prefill_s_per_token": 1 / 512, "copy_latency_s": 0.1, **dict.fromkeys(rates, 4.0 * MIB)}
    links = server(link_per_s="4MiB", host_link_per_s="1GiB")
    answer = planned(twice, two(links, machine=machine(**speeds)), of_ceiling=1.0)
    timed = answer.in_time
    assert timed is not None
    assert (timed.all_engines, timed.engines, timed.requests) == (True, 2, REQUESTS)
    assert timed.machine.value("disk_read_bytes_per_s") == 2 * MIB, "half of the server's link"
    # A new prompt takes 2 s. A prompt computed by the other engine takes 1 ms + 0.5 s from the server,
    # 0.1 + 0.25 s from RAM to the GPU, and 1 s for the last block.
    assert timed.without.ttft_s.mean == pytest.approx(2)
    mean = (2 * (REQUESTS - again) + again * (0.001 + 0.5 + 0.35 + 1)) / REQUESTS
    assert timed.with_offload.ttft_s.mean == pytest.approx(mean, rel=1e-3)
    assert timed.with_offload.offload_hit_blocks == again
    ram, below = timed.with_offload.tiers
    assert (ram.hit_blocks, below.hit_blocks) == (0, again)
    # Two engines write every new block once; an engine's last write can end after the recording.
    assert 2 * (REQUESTS - again) - 2 <= below.written <= 2 * (REQUESTS - again)
    assert timed.server_break_even_tokens == pytest.approx(0.101 * 512 / (1 - 1 / 4 - 1 / 2))
    assert answer.chosen.ttft_p90_s == timed.with_offload.ttft_s.p90
    text = words(answer)
    assert "RAM and servers keep up with their writes." in text
    assert "is waiting in the queue or for servers" in text
    assert "Loading from servers beats computing from" in text
    assert "on the busiest of" not in text
    share = 100 * again / REQUESTS / 2
    assert f"it saves {share:.1f}% of the prefill in time" in text


def test_room_for_the_requests_of_all_engines_is_checked_before_the_search(tmp_path: Path) -> None:
    # Engine 1 gets the longest request. Engine 0 gets more blocks, so it is timed for rows without servers.
    chains = [(2 * n, 2 * n + 1) for n in range(20)]
    chains[1] = tuple(range(100, 112))
    chains[2:20:2] = [tuple(range(200 + 10 * n, 204 + 10 * n)) for n in range(9)]
    recording = written(tmp_path / "long.jsonl", chains)
    of = two(machine=machine(), routing="round-robin")
    why = r"kv-per-gpu: .* have \d+ blocks; the longest request and its answer need 13 blocks"
    with pytest.raises(ConfigError, match=why):
        planned(recording, of)


def test_the_gain_of_too_expensive_servers_is_reported(twice: str) -> None:
    answer = planned(twice, two(server(price=1000)), budget=500)
    assert answer.chosen.purchase == NOTHING
    assert "servers" not in answer.words[0]
    loop = [(4 * n, 4 * n + 1) for _ in range(10) for n in range(20)]
    of = two(server(price=3000), Ram(module="10MiB", price=100, slots=10))
    dear = planned(written(Path(twice).with_name("loop.jsonl"), loop), of, saved=0.3)
    assert dear.chosen.servers == 0
    assert dear.chosen.ram_modules
    (gain,) = [sentence for sentence in dear.words if sentence.startswith("The cheapest with servers: ")]
    assert "10 MiB of RAM and a cache server of 1 GiB for 3,100 USD would save 90.0%, " in gain
    assert " points more (" in gain


def test_server_blocks_are_not_divided_by_replicas() -> None:
    of = two(server(memory="103MiB", price=7, slots=6), scale=2.0)
    assert of.server_blocks(Purchase(1, 0, 1)) == 50, "divided by the scale, not by replicas"
    assert of.server_blocks(Purchase(1, 0, 4)) == 200
    assert of.server_bytes(Purchase(1, 0, 4)) == 412 * MIB
    assert of.price(Purchase(2, 0, 3)) == 200 + 21
    assert of.server_steps(10_000) == [1, 2, 4, 6]
    assert of.server_steps(120) == [1, 2, 3], "more servers than the recording's blocks are not searched"
    assert two(server(memory="1KiB", slots=4)).server_steps(100) == []


@pytest.mark.slow
def test_the_fewest_servers_are_found_between_coarse_steps(twice: str) -> None:
    trace, ceiling = load_trace(twice), asked_twice()[1] / REQUESTS
    of = two(server(memory="5.15MiB", slots=8), Ram(module="2MiB", price=1, slots=1))
    saved = {}
    for servers in range(1, 9):
        tiers = parse_tiers("tiers", f"{of.server_blocks(Purchase(1, 0, servers))},policy=lru")
        config = ReplayConfig(1, device_blocks=5, tiers=tiers, instances=2, routing="random")
        saved[servers] = SharedReplay(trace, config).run().prefix_hit_ratio
    needed = next(share for servers, share in saved.items() if servers % 2 and share > 0.3 * ceiling)
    fewest = min(servers for servers, share in saved.items() if share >= needed)
    assert fewest in (3, 5, 6, 7), "between the coarse steps"
    answer = planned(twice, of, saved=needed)
    assert answer.chosen.purchase == Purchase(1, 0, fewest)


# ---- compared with rows without servers


@pytest.mark.parametrize("routing", ["session", "prefix", "random"])
@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
def test_a_useless_server_changes_nothing(chat: str, routing: str, store: str) -> None:
    for_sale = prices(Ram(module="1GiB", price=100, slots=4), server=server())
    of = fleet(for_sale, 20 * MIB, gpus=3, replicas=3, routing=routing)
    evidence = gather(TraceSource(chat, None, False), of, is_shared=True)
    alone = row_of(evidence, of, Purchase(2, 0), Setup(store, "lru", "all"))
    assert alone.row.by_ram > 0
    shared = row_of(evidence, of, Purchase(2, 0, 1), Setup(store, "lru", "all", server_admission=NOTHING_IN))
    assert shared.hits.tolist() == alone.hits.tolist()
    assert len(shared.hits) == len(evidence.refs)
    assert (shared.row.saved, shared.row.saved_low) == (alone.row.saved, alone.row.saved_low)
    assert shared.row.server_write_bytes_per_s == shared.row.by_servers == 0
    assert difference(evidence, shared, alone) == (0, 0, 0)
    used = row_of(evidence, of, Purchase(2, 0, 1), Setup(store, "lru", "all", server_admission="all"))
    # A victim tier shares only blocks evicted by the GPUs.
    assert used.row.saved > alone.row.saved or store == "on-device-eviction"


def test_windows_are_cut_by_engine(tmp_path: Path) -> None:
    """One of three engines has most requests, and one has only requests without blocks."""
    engines = whole_numbers(90, 3, seed=0).tolist()
    lines = [
        line(10_000 * n, [n % 7] if engine else [])
        for n, engine in enumerate(engines)
        if engine != 1 or n < 30
    ]
    (tmp_path / "uneven.jsonl").write_text("".join(lines))
    of = two(gpus=3, replicas=3)
    evidence = gather(TraceSource(str(tmp_path / "uneven.jsonl"), None, False), of, is_shared=True)
    alone = row_of(evidence, of, Purchase(1, 0), Setup("on-compute", "lru", "all"))
    setup = Setup("on-compute", "lru", "all", server_admission=NOTHING_IN)
    shared = row_of(evidence, of, Purchase(1, 0, 1), setup)
    assert shared.hits.tolist() == alone.hits.tolist()


# ---- rows are replays


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"routing": "session", "scale": 2.0}, {"routing": "prefix", "load": 4.0}]
)
def test_rows_with_servers_are_replays_of_all_engines(chat: str, options: dict[str, Any]) -> None:
    of = fleet(
        prices(Ram(module="200MiB", price=100, slots=2), drives(), server(memory="600MiB", slots=2)),
        100 * MIB, gpus=2, replicas=2, **{"routing": "random", **options},
    )  # fmt: skip
    answer = planned(chat, of, Setups(policies=("lru",), admissions=("all",)))
    trace = at_load(load_trace(chat), of.load)
    rows = [row for row in answer.rows if row.servers]
    assert {row.servers for row in rows} == {1, 2}
    assert {row.server_admission for row in rows} == {"all", "reuse:2"}
    assert not any(row.ssd_drives for row in rows)
    assert any(row.ssd_drives for row in answer.rows)
    for row in rows[::4]:
        size = min(row.server_blocks, trace.unique_blocks)
        tiers = parse_tiers("tiers", f"{size},policy=lru,admission={row.server_admission}")
        config = ReplayConfig(
            row.ram_blocks, row.policy, row.admission, row.device_blocks, row.store, tiers,
            instances=2, routing=of.routing,
        )  # fmt: skip
        report = SharedReplay(trace, config).run()
        assert row.saved == report.prefix_hit_blocks / trace.block_refs
        assert row.by_servers == report.tiers[-1].hit_blocks / trace.block_refs
        assert row.by_gpus == pytest.approx(answer.by_gpus)
        assert row.by_gpus + row.by_ram + row.by_ssds + row.by_servers == pytest.approx(row.saved)
        assert row.saved <= row.optimum == pytest.approx(answer.ceiling)
        seconds = (trace.timestamps_ms.max() - trace.timestamps_ms.min()) / 1000
        written_bytes = report.tiers[-1].blocks_written * MIB * of.scale
        assert row.server_write_bytes_per_s == pytest.approx(written_bytes / seconds)
    assert answer.ceiling >= answer.ceiling_apart


def test_a_sample_is_searched_and_confirmed_with_servers(twice: str) -> None:
    source, updates = TraceSource(twice, None, False), list[tuple[int, int]]()
    plan = Plan(source, two(), Target(of_ceiling=0.9), PLAIN, work=Work(jobs=1), one_in=2)
    answer = plan.run(lambda now: updates.append((now.rows_done, now.rows)))
    assert answer.chosen.servers == 1
    assert {row.one_in for row in answer.sampled} == {2}
    assert any(row.servers for row in answer.sampled)
    assert any(row.ram_modules and not row.servers for row in answer.rows), "the baseline of sharing"
    assert "Without servers: " in words(answer)
    assert answer.chosen.saved == answer.ceiling == asked_twice()[1] / REQUESTS
    assert updates == sorted(updates, key=lambda now: now[0])
    assert updates[-1][0] == len(answer.rows) - 1 + len(answer.sampled) - 1


def test_a_finished_plan_is_answered_from_the_journal(
    twice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> PlanAnswer:
        source, output = TraceSource(twice, None, False), tmp_path / "rows.csv"
        return Plan(source, two(), Target(of_ceiling=1.0), PLAIN, work=Work(jobs=1, output=output)).run()

    first = run()
    monkeypatch.setattr("kvoffload.sweep.workers.attempt", None)
    assert run() == first
    heading, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert {"servers", "server_bytes", "by_servers", "server_admission"} <= set(heading.split(","))
    assert len(rows) == len(first.rows)


# ---- infeasible rows, and rows that are not searched


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"link_per_s": "20KB"}, "to servers in the busiest minute exceed the servers' network"),
        ({"link_per_s": "20KB"}, "from servers in the busiest minute exceed the servers' network"),
        ({"host_link_per_s": "20KB"}, "to servers in the busiest minute exceed the hosts' network"),
    ],
)
def test_a_slow_network_makes_rows_infeasible(twice: str, options: dict[str, str], why: str) -> None:
    answer = planned(twice, two(server(slots=2, **options)), of_ceiling=0.5)
    assert answer.outcome == "NOT_REACHED"
    rows = [row for row in answer.rows if row.servers and row.by_servers > 0.2]
    assert rows
    assert all(why in row.why_not for row in rows)
    assert not any(row.servers for row in answer.frontier)
    assert "but is infeasible: " in words(answer)


def test_each_server_has_a_network_of_its_own(twice: str) -> None:
    chosen = planned(twice, two(server(memory="2GiB")), of_ceiling=1.0).chosen
    assert chosen.server_write_bytes_per_s is not None
    link = f"{0.75 * chosen.server_write_bytes_per_s * chosen.busy / 1000:.6f}KB"
    small = Server(memory="100MiB", price=50, slots=4, link_per_s=link)
    rows = [row for row in planned(twice, two(small), of_ceiling=0.1).rows if row.servers]
    assert {row.servers: row.feasible for row in rows} == {1: False, 2: True, 3: True}


def test_without_times_no_server_is_bought(tmp_path: Path) -> None:
    path = written(tmp_path / "at-once.jsonl", asked_twice()[0], step_ms=0)
    answer = planned(path, two())
    assert not answer.chosen.servers
    assert all("has no times" in row.why_not for row in answer.rows if row.servers)
    assert any(row.servers for row in answer.rows)


def sources(answer: PlanAnswer) -> dict[str, str]:
    return {assumption.name: f"{assumption.value}: {assumption.source}" for assumption in answer.assumptions}


def test_one_engine_searches_no_servers(twice: str) -> None:
    answer = planned(twice, two(gpus=1, replicas=1))
    assert not any(row.servers for row in answer.rows)
    assert answer.ceiling == answer.ceiling_apart
    assert sources(answer)["servers"] == "not searched: one engine only"
    assert "server.price" not in sources(answer)
    default = planned(twice, fleet(prices(server=Server())))
    assert "server" not in " ".join([*default.words, *default.cannot_tell, *sources(default)])
    looked_at = sources(planned(twice, two()))
    assert looked_at["servers"].startswith("lru, 1.03 bytes for a byte of blocks")
    assert looked_at["server.memory"].startswith("1GiB")


def test_without_servers_for_sale_none_are_mentioned(twice: str) -> None:
    answer = planned(twice, two(server(slots=0)))
    assert not any(row.servers for row in answer.rows)
    assert answer.ceiling == 0
    assert "server" not in " ".join([*answer.words, *answer.cannot_tell, *sources(answer)])


def test_a_purchase_that_is_never_full_is_reported(twice: str) -> None:
    full = "The purchase holds all blocks of the recording"
    assert full in " ".join(planned(twice, two(), of_ceiling=1.0).cannot_tell)
    small = planned(twice, two(server(memory="50MiB")), saved=0.05)
    assert small.chosen.servers
    assert full not in " ".join(small.cannot_tell)


# ---- waits


def test_rows_with_servers_have_no_waits(tmp_path: Path) -> None:
    """The second engine has most references and is timed; rows with servers span both engines, untimed."""
    second = whole_numbers(200, 2, seed=0).tolist()
    loop = [tuple(range(5 * n, 5 * n + 2 + 2 * second[n % 20])) for _ in range(10) for n in range(20)]
    path = written(tmp_path / "uneven.jsonl", loop, step_ms=1000 * STEP_S)
    of = two(server(price=3000), Ram(module="10MiB", price=100, slots=10), machine=by_hand())
    source, kept = TraceSource(path, None, False), tmp_path / "plan.csv"
    first, other = gather(source, of).traces
    assert first.block_refs < other.block_refs
    answer = Plan(source, of, Target(saved=0.3), PLAIN, work=Work(output=kept, jobs=1)).run()
    assert answer.in_time is not None
    assert answer.chosen.ttft_p90_s is not None
    assert {row.ttft_p90_s for row in answer.rows if row.servers} == {None}


def test_timed_servers_are_kept_in_the_journal(twice: str, tmp_path: Path) -> None:
    source, of = TraceSource(twice, None, False), two(machine=by_hand())
    kept = tmp_path / "kept.csv"
    answer = Plan(source, of, Target(of_ceiling=1.0), PLAIN, work=Work(jobs=1, output=kept)).run()
    assert answer.chosen.servers
    updates = list[Progress]()
    again = Plan(source, of, Target(of_ceiling=1.0), PLAIN, work=Work(jobs=1, output=kept, force=True)).run(
        updates.append
    )
    assert again.in_time == answer.in_time
    assert not [now for now in updates if now.of == "timed replays"]
    slower = two(server(link_per_s="1MiB"), machine=by_hand())
    other = Plan(
        source, slower, Target(of_ceiling=1.0), PLAIN, work=Work(jobs=1, output=kept, force=True)
    ).run()
    assert other.in_time is not None
    assert other.in_time.with_offload.ttft_s.mean > answer.in_time.with_offload.ttft_s.mean  # type: ignore[union-attr]
    alone = planned(twice, two(machine=by_hand()), saved=0.0)
    assert not alone.chosen.servers
    assert alone.in_time is not None
    assert not alone.in_time.all_engines


def test_ssds_that_save_less_than_servers_are_not_mentioned(twice: str) -> None:
    of = fleet(
        prices(Ram(module="10MiB", price=100, slots=4), drives(), server=server()),
        gpus=2, replicas=2, routing="random",
    )  # fmt: skip
    answer = planned(twice, of, of_ceiling=1.0)
    assert answer.chosen.purchase == Purchase(1, 0, 1)
    behind_equal_ram = [row for row in answer.rows if row.ssd_drives and row.ram_modules == 1]
    assert behind_equal_ram, "rows with SSDs and the same RAM"
    assert max(row.saved for row in behind_equal_ram) < answer.chosen.saved
    assert "SSD" not in words(answer)


def test_a_ttft_target_searches_no_servers(twice: str) -> None:
    answer = planned(twice, two(machine=by_hand()), ttft_p90_s=1.0)
    assert not any(row.servers for row in answer.rows)
    assert (
        "With a target in seconds no servers are searched: each purchase would be timed on all engines."
        in answer.cannot_tell
    )
    assert sources(answer)["servers"].startswith("not searched: a target in seconds")


# ---- the command


@pytest.mark.parametrize("slots", [1, 2])
def test_the_vllm_option_contains_the_servers(twice: str, tmp_path: Path, slots: int) -> None:
    memory = "1GiB" if slots == 1 else "10MiB"
    of_prices = prices(Ram(module="10MiB", price=100, slots=4), server=server(memory=memory, slots=slots))
    (tmp_path / "prices.toml").write_text(as_toml(of_prices))
    arguments = ("plan", twice, "--bytes-per-token", "2KiB", "--gpus", "2", "--kv-per-gpu", "5MiB",
                 "--replicas", "2", "--routing", "random", "--prices", tmp_path / "prices.toml",
                 "--policies", "lru", "--admissions", "all",
                 "--stores", "on-compute", "--server-admissions", "all", "--jobs", "1", "--quiet",
                 "--output", tmp_path / "rows.csv")  # fmt: skip
    done = kvoffload(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["chosen"]["servers"] == slots
    extra = json.loads(shlex.split(answer["vllm"])[1])["kv_connector_extra_config"]
    (tier,) = parse_options(extra).tiers
    nodes = ",".join(f"cache-server-{number + 1}:6379" for number in range(slots))
    assert str(tier).startswith(f"{'valkey' if slots == 1 else 'valkey+cluster'}://{nodes}/kv")
    shown = kvoffload(*arguments)
    assert answer["vllm"] in shown.stdout
    text = " ".join(shown.stdout.split())
    assert "Each engine (replace paths and addresses by yours):" in text
    for sentence in (*answer["words"], *answer["cannot_tell"]):
        assert " ".join(sentence.split()) in text
    (line_of_it,) = [line.split() for line in shown.stdout.splitlines() if line.lstrip().startswith("* ")]
    assert line_of_it[:7] == ["*", "10", "MiB", "-", str(slots), f"{100 + 50 * slots}",
                              f"{100 * answer['chosen']['saved']:.1f}%"]  # fmt: skip


def test_hits_of_the_windows_add_up(twice: str) -> None:
    answer = planned(twice, two(), of_ceiling=1.0)
    refs = gather(TraceSource(twice, None, False), two()).refs
    chosen = np.array([window.chosen for window in answer.over_time])
    assert float((chosen * refs).sum()) == pytest.approx(answer.chosen.saved * int(refs.sum()))
