"""Reports: one file with the numbers of ``--format json``, and charts drawn by a real browser."""

from __future__ import annotations

import html.parser
import importlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.errors import ConfigError
from kvoffload.pages.page import check_report
from kvoffload.plan.prices import Prices, Ram, Server, Ssd, as_toml
from support.run_cli import kvoffload
from support.timeouts import HANGS_S

pytest.importorskip("plotly", reason="reports take plotly: pip install 'kvoffload[report]'")
from plotly.offline import get_plotlyjs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PHONE, DESK = 360, 1200


@pytest.fixture(scope="module")
def plan(chat: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The page of a plan, and the JSON of the same command."""
    home = tmp_path_factory.mktemp("plan-page")
    ssd = Ssd(drive="400MiB", price=10, slots=1, writes_per_day=5)
    (home / "prices.toml").write_text(as_toml(Prices(ram=Ram(module="100MiB", price=9, slots=4), ssd=ssd)))
    done = kvoffload(
        "plan", chat, "--bytes-per-token", "2KiB", "--gpus", "1", "--kv-per-gpu", "200MiB",
        "--prices", home / "prices.toml", "--jobs", "1", "--report", home / "plan.html", "--format", "json",
        "--machine", "h100-pcie5", "--prefill-tokens-per-s", "1000", "--load", "0.1", "--admissions", "all",
        "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return home / "plan.html", done.stdout


@pytest.fixture(scope="module")
def sampled(chat: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Page and JSON of a plan with shared servers, searched on one of two sessions."""
    home = tmp_path_factory.mktemp("sampled-page")
    of_server = Server(memory="300MiB", price=5, slots=2)
    for_sale = Prices(ram=Ram(module="100MiB", price=9, slots=4), ssd=Ssd(slots=0), server=of_server)
    (home / "prices.toml").write_text(as_toml(for_sale))
    done = kvoffload(
        "plan", chat, "--bytes-per-token", "2KiB", "--gpus", "2", "--kv-per-gpu", "100MiB",
        "--replicas", "2", "--routing", "random", "--prices", home / "prices.toml", "--sample", "2",
        "--policies", "lru", "--admissions", "all", "--jobs", "1", "--report", home / "plan.html",
        "--format", "json", "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return home / "plan.html", done.stdout


@pytest.fixture(scope="module")
def sweep(chat: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Page and JSON of a sweep."""
    path = tmp_path_factory.mktemp("sweep-page") / "sweep.html"
    done = kvoffload(
        "sweep", chat, "--capacities", "2%,5%,10%", "--device-blocks", "0,0.5x", "--jobs", "1", "--quiet",
        "--report", path, "--format", "json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.fixture(scope="module")
def explain(chat: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Page and JSON of an explanation."""
    path = tmp_path_factory.mktemp("explain-page") / "explain.html"
    done = kvoffload("explain", chat, "--report", path, "--format", "json", "--quiet")
    assert done.returncode == 0, done.stderr
    return path, done.stdout


class Page(html.parser.HTMLParser):
    """Content of a page: texts by tag, scripts by id, and addresses that the browser would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.scripts: dict[str, str] = {}
        self.loads: list[str] = []
        self.ids: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        self.loads += [value for name in ("src", "href") if (value := given.get(name))]
        if tag not in ("meta", "link", "br"):
            self._open.append((tag, given.get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, "tags are properly nested"

    def handle_data(self, data: str) -> None:
        tag, its_id = self._open[-1] if self._open else ("", "")
        if tag == "script":
            self.scripts[its_id] = self.scripts.get(its_id, "") + data
        elif data.strip():
            self.texts.append((tag, data))


def charts(page: Page) -> dict[str, Any]:
    return {chart["id"]: chart for chart in json.loads(page.scripts["charts"])}


@pytest.mark.parametrize("kind", ["plan", "sweep", "explain"])
@pytest.mark.slow
def test_a_page_has_the_numbers_of_the_json(kind: str, request: pytest.FixtureRequest) -> None:
    path, printed = request.getfixturevalue(kind)
    page = Page(path)
    assert json.loads(page.scripts["result"]) == json.loads(printed)
    assert page.loads == [], "nothing is loaded"
    assert len(set(page.ids)) == len(page.ids)
    assert set(charts(page)) <= set(page.ids)
    (command,) = [text for tag, text in page.texts if tag == "pre" and text.startswith("kvoffload ")]
    assert command.startswith(f"kvoffload {kind} ")


def test_the_charts_of_a_plan_have_its_rows(plan: tuple[Path, str]) -> None:
    path, printed = plan
    page, plan_json = Page(path), json.loads(printed)
    drawn = charts(page)
    assert set(drawn) == {"frontier", "over-ram", "places", "wear", "waits", "over-time"}
    paragraphs = [text.replace("\u00a0", " ") for tag, text in page.texts if tag == "p"]
    titles = [text for tag, text in page.texts if tag == "h2"]
    assert titles[:3] == ["Waits", "Other purchases", "Limits"], "the sections of the answer come first"
    for sentence in (*plan_json["words"], *plan_json["cannot_tell"]):
        assert sentence in paragraphs
    by_name = {row["name"]: row for row in drawn["frontier"]["data"]}
    for name, rows in (
        ("feasible", [row for row in plan_json["rows"] if row["feasible"]]),
        ("infeasible: SSD wear", [row for row in plan_json["rows"] if row["exceeds"] == "SSD wear"]),
        ("most for the money", plan_json["frontier"]),
        ("recommended", [plan_json["chosen"]]),
    ):
        assert by_name[name]["x"] == [row["price"] for row in rows]
        assert by_name[name]["y"] == [100 * row["saved"] for row in rows]
    lines = [
        series for series in drawn["over-ram"]["data"] if series["name"] != "optimum" and len(series["x"]) > 2
    ]
    alone = [row for row in plan_json["rows"] if row["ram_modules"] and not row["ssd_drives"]]
    points = sorted((x, y) for line in lines for x, y in zip(line["x"], line["y"], strict=True))
    assert points
    assert set(points) <= {(row["ram_bytes"] / 2**30, 100 * row["saved"]) for row in alone}
    best = next(series for series in drawn["over-ram"]["data"] if series["name"] == "optimum")
    assert all(
        y <= top + 1e-9 for x, y in points for at, top in zip(best["x"], best["y"], strict=True) if at == x
    )
    stacked = [
        sum(shares) for shares in zip(*(series["y"] for series in drawn["places"]["data"]), strict=True)
    ]
    assert stacked == pytest.approx([100 * row["saved"] for row in plan_json["frontier"]])
    assert {row["exceeds"] for row in plan_json["rows"] if not row["feasible"]} == {"SSD wear"}
    runs = [plan_json["in_time"][name] for name in ("with_offload", "without")]
    for bars, run in zip(drawn["waits"]["data"], runs, strict=True):
        assert bars["x"] == ["p50", "mean", "p90", "p99"]
        assert bars["y"] == [run["ttft_s"][name] for name in bars["x"]]
    cells = [text for tag, text in page.texts if tag == "td"]
    assert {link["name"] for link in runs[0]["links"]} <= set(cells)
    for row in plan_json["purchases"]:
        assert f"{100 * row['saved']:.1f}%" in cells


def test_axes_are_in_units_and_mark_the_recommendation(plan: tuple[Path, str]) -> None:
    drawn, plan_json = charts(Page(plan[0])), json.loads(plan[1])
    axis = drawn["places"]["layout"]["xaxis"]
    labels = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    for number, row in enumerate(plan_json["frontier"], 1):
        ram = f"{row['ram_bytes'] >> 20} MiB" if row["ram_bytes"] else "nothing"
        assert labels[number].removeprefix("<b>★ ").startswith(ram)
        assert ("★" in labels[number]) == (row == plan_json["chosen"])
    ends_s = [window["until_s"] for window in plan_json["over_time"]]
    assert ends_s == sorted(ends_s)
    assert ends_s[-1] == pytest.approx(plan_json["duration_s"])
    unit_s = {"minutes": 60, "hours": 3600}[drawn["over-time"]["layout"]["xaxis"]["title"]["text"]]
    for line in drawn["over-time"]["data"]:
        assert line["x"] == pytest.approx([end_s / unit_s for end_s in ends_s])


def test_the_best_setups_are_drawn_and_others_on_a_click(plan: tuple[Path, str]) -> None:
    drawn, plan_json = charts(Page(plan[0]))["over-ram"]["data"], json.loads(plan[1])
    lines = {series["name"]: series for series in drawn}
    bought = [row for row in plan_json["rows"] if row["ram_modules"] and not row["ssd_drives"]]
    best = {row["ram_bytes"]: 100 * row["saved"] for row in sorted(bought, key=lambda row: row["saved"])}
    shown = lines["best setup of each size"]
    assert dict(zip(shown["x"], shown["y"], strict=True)) == {ram / 2**30: best[ram] for ram in best}
    hidden = [series for series in drawn if series["name"] == "other setups: click"]
    assert hidden
    assert {series["visible"] for series in hidden} == {"legendonly"}
    assert [series["showlegend"] for series in hidden] == [True, *[False] * (len(hidden) - 1)]


def test_reasons_are_short_and_explained_once(plan: tuple[Path, str]) -> None:
    page, plan_json = Page(plan[0]), json.loads(plan[1])
    infeasible = [row for row in plan_json["purchases"] if not row["feasible"]]
    cells = [text for tag, text in page.texts if tag == "td"]
    worn = [row for row in plan_json["rows"] if row["exceeds"] == "SSD wear"]
    assert len(worn) > 1
    assert any(row["ssd_write_budget"] for row in plan_json["purchases"]), (
        "a worn SSD is tried with a write budget"
    )
    assert cells.count("SSD wear") == len(infeasible)
    assert not [cell for cell in cells if "drive writes a day" in cell and "SSD takes" not in cell]
    examples = [text for tag, text in page.texts if tag == "p" and text.startswith("SSD wear, for example")]
    assert len(examples) == min(1, len(infeasible))
    values = [text for tag, text in page.texts if tag == "td" and text.endswith(" B")]
    assert not values, "sizes have units"


@pytest.mark.parametrize("kind", ["plan", "sweep"])
def test_a_page_has_less_than_half_of_the_bytes_of_plotly(kind: str, request: pytest.FixtureRequest) -> None:
    path, printed = request.getfixturevalue(kind)
    assert path.stat().st_size < len(get_plotlyjs()) / 2 + 4 * len(printed)


def test_a_missing_plotly_is_a_message_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(
        ConfigError, match=r"plan.html' is invalid; it needs plotly: pip install 'kvoffload\["
    ):
        check_report(tmp_path / "plan.html", force=False)


def test_the_charts_of_a_sampled_plan_separate_rows_of_the_sample(sampled: tuple[Path, str]) -> None:
    path, printed = sampled
    page, plan_json = Page(path), json.loads(printed)
    drawn = charts(page)
    assert plan_json["sampled"]
    assert {row["one_in"] for row in plan_json["sampled"]} == {2}
    by_name = {row["name"]: row for row in drawn["frontier"]["data"]}
    for name, rows in (
        ("feasible", plan_json["rows"]),
        ("on one of 2 sessions", plan_json["sampled"]),
        ("recommended", [plan_json["chosen"]]),
    ):
        feasible = [row for row in rows if row["feasible"]]
        assert feasible
        assert by_name[name]["x"] == [row["price"] for row in feasible]
        assert by_name[name]["y"] == [100 * row["saved"] for row in feasible]
    notes = [text for _, text in page.texts]
    assert any("Points on a part of the sessions guided the search" in note for note in notes)
    assert any(note.endswith("On one of 2 sessions.") for note in notes)
    alone = [row for row in plan_json["sampled"] if row["ram_modules"] and not row["servers"]]
    for series in drawn["over-ram"]["data"]:
        points = set(zip(series["x"], series["y"], strict=True))
        shown = {(row["ram_bytes"] / 2**30, 100 * row["saved"]) for row in alone}
        assert series["name"] == "optimum" or points <= shown


def test_a_page_shows_servers(sampled: tuple[Path, str], plan: tuple[Path, str]) -> None:
    page, plan_json = Page(sampled[0]), json.loads(sampled[1])
    assert any(row["servers"] for row in plan_json["frontier"])
    shares = {chart["name"]: chart["y"] for chart in charts(page)["places"]["data"]}
    assert set(shares) == {"GPUs", "RAM", "SSDs", "servers"}
    assert shares["servers"] == [100 * row["by_servers"] for row in plan_json["frontier"]]
    stacked = [sum(heights) for heights in zip(*shares.values(), strict=True)]
    assert stacked == pytest.approx([100 * row["saved"] for row in plan_json["frontier"]])
    assert "servers" in [text for tag, text in page.texts if tag == "th"]
    assert "servers" not in [text for tag, text in Page(plan[0]).texts if tag == "th"], "one engine"


def test_the_chart_of_an_explanation_has_every_miss(explain: tuple[Path, str]) -> None:
    path, printed = explain
    page, explanation = Page(path), json.loads(printed)
    (bars,) = charts(page)["reasons"]["data"]
    assert dict(zip(bars["y"], bars["x"], strict=True)) == {
        reason.replace("_", " "): blocks for reason, blocks in explanation["reasons"].items()
    }
    texts = [text for _, text in page.texts]
    for reason, meaning in explanation["meanings"].items():
        assert f"{reason}: {meaning}." in texts
    assert sum(bars["x"]) == explanation["misses"]


def test_the_charts_of_a_sweep_have_its_rows(sweep: tuple[Path, str]) -> None:
    path, printed = sweep
    drawn, rows = charts(Page(path)), json.loads(printed)
    assert len(drawn) == 6, "hits, writes and both, without a device and with one"
    for number, device in enumerate(("0", "0.5x")):
        device_rows = [row for row in rows if row["device"] == device]
        for policy in ("lru", "arc"):
            line = next(
                series
                for series in drawn[f"hits-{number}"]["data"]
                if series["name"] == f"{policy}, on-compute"
            )
            of_policy = [row for row in device_rows if row["policy"] == policy]
            assert line["x"] == [row["capacity_blocks"] for row in of_policy]
            assert line["y"] == [100 * row["prefix_hit_ratio"] for row in of_policy]
            for row, above in zip(of_policy, line["error_y"]["array"], strict=True):
                assert math.isclose(row["ci_high"], row["prefix_hit_ratio"] + above / 100)


def test_content_cannot_break_a_page(tmp_path: Path, chat: str) -> None:
    evil = tmp_path / "<b>&amp;</script><script>alert(1)</script>"
    evil.mkdir(parents=True)
    path = evil / "a<i>b.jsonl"
    path.write_bytes(Path(chat).read_bytes())
    report = tmp_path / "page.html"
    done = kvoffload("sweep", path, "--policies", "lru", "--jobs", "1", "--quiet", "--report", report)
    assert done.returncode == 0, done.stderr
    page = Page(report)
    assert any("a<i>b" in text for tag, text in page.texts if tag == "h1")
    assert "alert(1)" not in "".join(page.scripts.values()).replace(page.scripts["result"], "")


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_an_impossible_report_is_refused_before_the_work(command: str, tmp_path: Path, chat: str) -> None:
    options = ("--gpus", "1", "--kv-per-gpu", "1GB", "--bytes-per-token", "2KiB") if command == "plan" else ()
    (tmp_path / "there.html").write_text("precious")
    for name, why in (
        ("page.pdf", "a file that ends in .html"),
        ("there.html", "--force replaces it"),
        ("missing/page.html", "the file cannot be written (No such file or directory)"),
        ("there.html/page.html", "the file cannot be written (Not a directory)"),
    ):
        done = kvoffload(command, chat, *options, "--report", tmp_path / name)
        assert done.returncode == 2
        assert why in done.stderr
    assert (tmp_path / "there.html").read_text() == "precious"


@pytest.mark.parametrize("command", ["plan", "sweep", "explain"])
def test_the_answer_is_printed_if_the_page_cannot_be_written(
    command: str, tmp_path: Path, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk can fill up during the replays."""

    def full(path: Path, content: str) -> None:
        raise ConfigError("report", str(path), "the file cannot be written (No space left on device)")

    module = importlib.import_module(f"kvoffload.cli.{command}")
    monkeypatch.setattr(module, "write_report", full)
    options = {
        "plan": ("--gpus", "1", "--kv-per-gpu", "200MiB", "--bytes-per-token", "2KiB", "--policies", "lru",
                 "--ssd-admissions", "all", "--jobs", "1"),
        "sweep": ("--policies", "lru", "--capacities", "5%", "--jobs", "1"),
        "explain": ("--capacity", "5%", "--no-capacities"),
    }  # fmt: skip
    report = ("--report", str(tmp_path / "page.html"), "--quiet")
    called = getattr(module, "command" if command == "explain" else command)
    done = CliRunner().invoke(called, [chat, *options[command], *report])
    assert isinstance(done.exception, ConfigError), done.output
    assert {"plan": "of the prefill", "sweep": "lru", "explain": "missing"}[command] in done.output


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a real headless browser; skips with the reason if none is installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((program_path for name in BROWSERS if (program_path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    with api.sync_playwright() as started:
        # Chromium's sandbox does not run as root in containers.
        running = started.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=1000 * HANGS_S
        )
        yield running
        running.close()


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """Open a page and wait for its charts; returns the page, and the browser's errors and warnings."""
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    view.set_default_timeout(1000 * HANGS_S)
    complaints: list[str] = []
    view.on(
        "console",
        lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("request", lambda request: None if request.url.startswith(("file:", "data:", "blob:"))
            else complaints.append(f"loads {request.url}"))  # fmt: skip
    view.goto(path.as_uri())
    view.wait_for_selector("html[data-drawn]")
    return view, complaints


@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [
        ("plan", PHONE, "dark"),
        ("plan", DESK, "light"),
        ("sampled", PHONE, "light"),
        ("sweep", DESK, "dark"),
        ("explain", PHONE, "dark"),
    ],
)
@pytest.mark.slow
def test_a_browser_draws_all_charts(
    kind: str, width: int, scheme: str, browser: Any, request: pytest.FixtureRequest
) -> None:
    path, _ = request.getfixturevalue(kind)
    view, complaints = opened(browser, path, width, scheme)
    drawn = charts(Page(path))
    assert view.evaluate("document.documentElement.dataset.drawn") == str(len(drawn))
    for name, chart in drawn.items():
        shown = view.locator(f"#{name} .main-svg").first.bounding_box()
        assert 250 < shown["width"] <= width
        marks = view.locator(f"#{name} .point, #{name} .js-line, #{name} .bars path").count()
        assert marks >= len([series for series in chart["data"] if series.get("visible") != "legendonly"])
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
    ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128
    assert light == (scheme == "light")
    assert complaints == []
    view.close()


def test_a_point_has_a_tooltip(browser: Any, plan: tuple[Path, str]) -> None:
    path, printed = plan
    view, complaints = opened(browser, path, DESK, "light")
    plan_json = json.loads(printed)
    star = view.locator("#frontier .trace.scatter .point").last
    star.scroll_into_view_if_needed()
    # The layer above the points receives the mouse events.
    box = star.bounding_box()
    view.mouse.move(box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2)
    view.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = view.locator("#frontier .hoverlayer .hovertext").first
    label.wait_for()
    assert f"{100 * plan_json['chosen']['saved']:.1f}%" in label.text_content()
    assert complaints == []
    view.close()


@pytest.mark.slow
def test_charts_can_be_saved(browser: Any, plan: tuple[Path, str], tmp_path: Path) -> None:
    view, complaints = opened(browser, plan[0], DESK, "light")
    for kind, begins in (("png", b"\x89PNG"), ("svg", b"<svg")):
        with view.expect_download() as download:
            view.locator(f'button[data-chart="frontier"][data-format="{kind}"]').click()
        download.value.save_as(tmp_path / f"chart.{kind}")
        assert (tmp_path / f"chart.{kind}").read_bytes().startswith(begins)
        assert download.value.suggested_filename == f"frontier.{kind}"
    assert complaints == []
    view.close()


def test_a_page_can_be_printed(browser: Any, plan: tuple[Path, str]) -> None:
    view, complaints = opened(browser, plan[0], PHONE, "dark")
    paper = view.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 2
    view.emulate_media(media="print")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert complaints == []
    view.close()
