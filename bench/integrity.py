"""Integrity of cache tiers after damage, and cost of durability on disks: ``python bench/integrity.py``.

Damages the stored data of a tier, reads every block, and compares the bytes. Uses the real objects of each
product:

    disks     our `DiskTier`; vLLM's `fs` secondary tier and its simple connector's disk; LMCache's `fs` (also
              with AES-GCM) and `fs_native` adapters; spoolcache's store; SGLang's `file` backend; kvoffload
              in SGLang, LMCache and transformers; `kvoffload.open`
    servers   damaged through the server: our tier and LMCache's `resp` adapter in Valkey; our tier and
              vLLM's `obj` tier (NIXL's OBJ plug-in) in a bucket; Mooncake's store in files

Then times writes and reads of most disk tiers in turns. Prints ratios to kvoffload in the same round, median
and quartiles, because absolute times of a busy machine mean nothing. Each product runs in its own Python
(``--vllm-python`` and so on); a missing product is listed with the reason. Exits with 1 if kvoffload served a
wrong byte.

The other products (CPU builds) are installed with::

    make engines-env                             # vLLM 0.32.0; SGLang 0.5.23, LMCache 0.5.6
    bash tools/lmcache_env.sh .venv-lmcache
    python -m venv .venv-spoolcache              # Python 3.11 or later
    .venv-spoolcache/bin/pip install torch==2.13.0 numpy
    .venv-spoolcache/bin/pip install --no-deps spoolcache==0.3.0
    pip install --no-deps --target .venv-nixl nixl==1.5.1 nixl-cu12==1.5.1
    python -m venv .venv-mooncake
    .venv-mooncake/bin/pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy
    apt-get install libibverbs1                  # for Mooncake

vLLM's `obj` tier needs ``PYTHONPATH=.venv-nixl``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.doors import SERVER
from peers.scenes import KINDS, OF_FILES
from peers.speed import Server
from remote import rclone, valkey

HERE = Path(__file__).resolve().parent
KIB, MIB = 1024, 1024 * 1024
MAX_BATCH_BYTES, MAX_BATCH_BLOCKS = 128 * MIB, 256
BLOCK_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
TIMED = ("write", "write and fsync of each file", "write and syncfs", "read")

MODULES = {
    "kvoffload": "kvoffload_disk",
    "vllm": "vllm_fs",
    "vllm-simple": "vllm_simple_disk",
    "lmcache": "lmcache_fs",
    "lmcache-aesgcm": "lmcache_fs",
    "lmcache-direct": "lmcache_fs",
    "lmcache-native": "lmcache_fs",
    "spoolcache": "spoolcache_files",
    "sglang": "sglang_storage",
    "kvoffload-sglang": "sglang_storage",
    "kvoffload-lmcache": "lmcache_kvoffload",
    "kvoffload-open": "kvoffload_open",
    "kvoffload-transformers": "kvoffload_transformers",
    "kvoffload-valkey": "kvoffload_remote",
    "lmcache-resp": "lmcache_resp",
    "kvoffload-s3": "kvoffload_remote",
    "vllm-obj": "vllm_obj",
    "mooncake": "mooncake_files",
    "mooncake-checked": "mooncake_files",
}
TITLES = {
    "kvoffload": "kvoffload disk tier",
    "vllm": "vLLM `fs` tier",
    "vllm-simple": "vLLM `SimpleCPUOffloadConnector`, disk",
    "lmcache": "LMCache `fs`",
    "lmcache-aesgcm": "LMCache `fs`, AES-GCM",
    "lmcache-direct": "LMCache `fs`, O_DIRECT",
    "lmcache-native": "LMCache `fs_native`, O_DIRECT",
    "spoolcache": "spoolcache",
    "sglang": "SGLang `file`",
    "kvoffload-sglang": "kvoffload in SGLang",
    "kvoffload-lmcache": "kvoffload in LMCache",
    "kvoffload-open": "`kvoffload.open`",
    "kvoffload-transformers": "kvoffload in transformers",
    "kvoffload-valkey": "kvoffload `valkey://`",
    "lmcache-resp": "LMCache `resp`",
    "kvoffload-s3": "kvoffload `s3://`",
    "vllm-obj": "vLLM `obj` tier",
    "mooncake": "Mooncake store, files",
    "mooncake-checked": "Mooncake store, files and checksums",
}


@contextlib.contextmanager
def mooncake(python: str) -> Iterator[str]:
    """Run the Mooncake master of this Python; yields its ports and the root of its files."""
    rpc, metadata, metrics = (free_port() for _ in range(3))
    with tempfile.TemporaryDirectory() as root:
        command = [
            str(Path(python).with_name("mooncake_master")), f"--rpc_port={rpc}", f"--metrics_port={metrics}",
            "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={metadata}", f"--root_fs_dir={root}",
            "--default_kv_lease_ttl=100ms",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
            try:
                wait_for_port(rpc, master)
                wait_for_port(metadata, master)
                yield f"{rpc} {metadata} {root}"
            finally:
                master.kill()


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens. Raises `OSError`."""
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


IN_SERVERS: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "kvoffload-valkey": lambda _: valkey(),
    "lmcache-resp": lambda _: valkey(),
    "kvoffload-s3": lambda _: rclone(),
    "vllm-obj": lambda _: rclone(),
    "mooncake": mooncake,
    "mooncake-checked": mooncake,
}
"""Starts a server for the product, given its Python. These products are damaged, not timed."""
NOT_TIMED = (
    *("vllm-simple", "lmcache-aesgcm", "sglang", "kvoffload-sglang", "kvoffload-lmcache"),
    *("kvoffload-open", "kvoffload-transformers"),
)
NOT_DAMAGED = ("lmcache-direct",)
"""Writes the same files as `lmcache`, with direct I/O."""


class NotRunError(Exception):
    """A product is not installed or does not start; the message is the reason."""


class Bench(NamedTuple):
    """Installed products and the options of a run.

    Attributes:
        pythons: the Python of each module.
        directory: a directory on the measured file system.
    """

    pythons: dict[str, str]
    directory: Path
    seed: int
    rounds: int

    def command(self, what: str, product: str, *options: str) -> list[str]:
        """Build the command of a product's driver. Raises `NotRunError` if its Python does not exist."""
        module = MODULES[product]
        python = self.pythons[module]
        if not Path(python).exists():
            raise NotRunError(f"there is no {python}")
        return [python, "-m", "peers.drive", what, module, product, *options]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment in which every Python can import `peers`."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **variables}


@contextlib.contextmanager
def server_of(product: str, python: str) -> Iterator[dict[str, str]]:
    """Run the product's server, if it needs one; yields environment variables with its address.

    Raises `NotRunError`.
    """
    with contextlib.ExitStack() as stack:
        variables = {}
        if product in IN_SERVERS:
            try:
                variables[SERVER] = str(stack.enter_context(IN_SERVERS[product](python)))
            except (ImportError, OSError) as error:
                raise NotRunError(f"no server: {error}") from None
        yield variables


def damage(bench: Bench, product: str, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the product's version and configuration, then a row per kind of damage. Raises `NotRunError`."""
    options = [f"--kind={kind}" for kind in kinds if product not in IN_SERVERS or kind not in OF_FILES]
    with (
        tempfile.TemporaryDirectory(dir=bench.directory) as directory,
        tempfile.TemporaryFile("w+") as log,
        server_of(product, bench.pythons[MODULES[product]]) as server,
    ):
        options += [f"--seed={bench.seed}", f"--rounds={bench.rounds}", f"--directory={directory}"]
        command = bench.command("damage", product, *options)
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(**server)
        )
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
        if child.wait():
            log.seek(0)
            raise NotRunError((log.read().strip().splitlines() or ["no reason given"])[-1])


def all_damage(bench: Bench, products: list[str], kinds: list[str]) -> dict[str, Any]:
    """Damage every product; returns its rows, or the reason why it did not run."""
    report: dict[str, Any] = {}
    for product in products:
        if product in NOT_DAMAGED:
            continue
        report[product] = {"rows": []}
        try:
            for row in damage(bench, product, kinds):
                if "version" in row:
                    report[product].update(row)
                else:
                    report[product]["rows"].append(row)
                    print(f"{product}: {row}", file=sys.stderr)
        except NotRunError as reason:
            report[product]["not_run"] = str(reason)
    return report


def all_speed(bench: Bench, products: list[str], rounds: int) -> dict[str, Any]:
    """Time every disk tier; returns ratios to kvoffload's time by block size, and the products not run."""
    report: dict[str, Any] = {"not_run": {}, "rows": []}
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for product in dict.fromkeys(("kvoffload", *products)):
            if product in IN_SERVERS or product in NOT_TIMED:
                continue
            try:
                server = Server(bench.command("speed", product), environment())
            except NotRunError as reason:
                report["not_run"][product] = str(reason)
                continue
            servers[product] = server
            stack.callback(server.close)
        for block_bytes in BLOCK_BYTES:
            with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
                for product in list(servers):
                    try:
                        open_tier(servers[product], Path(directory) / product, block_bytes)
                    except RuntimeError as reason:
                        report["not_run"][product] = str(reason)
                        del servers[product]
                own_server = servers["kvoffload"]
                other_servers = {
                    product: server for product, server in servers.items() if server is not own_server
                }
                # Not counted: the first round creates files and threads, and allocates memory.
                rounds_s = [one_round(own_server, other_servers) for _ in range(rounds + 1)][1:]
            print(f"{block_bytes} bytes, seconds: {rounds_s}", file=sys.stderr)
            for product in other_servers:
                ratios = {
                    operation: [
                        round_s[product][operation] / round_s["kvoffload"][operation] for round_s in rounds_s
                    ]
                    for operation in TIMED
                }
                report["rows"].append({"block_bytes": block_bytes, "product": product, "ratios": ratios})
    return report


def open_tier(server: Server, directory: Path, block_bytes: int) -> None:
    """Open a tier for one batch of blocks of this size. Raises `RuntimeError`."""
    directory.mkdir()
    num_blocks = min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // block_bytes)
    server.do(f"open {directory} {block_bytes} {num_blocks}")


def one_round(own_server: Server, other_servers: dict[str, Server]) -> dict[str, dict[str, float]]:
    """Time each operation of each product in turns, in seconds. Our tier always syncs."""
    write, each, whole, read = TIMED
    seconds: dict[str, dict[str, float]] = {product: {} for product in ("kvoffload", *other_servers)}
    seconds["kvoffload"][write] = seconds["kvoffload"][each] = own_server.do("write").seconds
    for product, server in other_servers.items():
        seconds[product][write] = server.do("write").seconds
        seconds[product][each] = seconds[product][write] + server.do("fsync").seconds
    for product, server in (("kvoffload", own_server), *other_servers.items()):
        seconds[product][read] = server.do("read").seconds
    seconds["kvoffload"][whole] = own_server.do("write").seconds
    for product, server in other_servers.items():
        seconds[product][whole] = server.do("write").seconds + server.do("syncfs").seconds
    return seconds


# ---- printing


def cell(rows: list[dict[str, Any]], kind: str) -> str:
    """Format the damaged blocks of all lives: served right / served wrong / missed."""
    rows_of_kind = [row for row in rows if row["kind"] == kind]
    played = [row for row in rows_of_kind if "skipped" not in row]
    if not played:
        return rows_of_kind[0]["skipped"] if rows_of_kind else ""
    num_right, wrong, missed, others_lost = (
        sum(row[name] for row in played) for name in ("right", "wrong", "missed", "others_lost")
    )
    text = f"{num_right} / {f'**{wrong}**' if wrong else 0} / {missed}"
    if others_lost:
        text += f", and {others_lost} others lost"
    ended = sorted({row["ended"] for row in played if row["ended"]})
    return text + "".join(f"; {why}" for why in ended)


def markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def damage_tables(report: dict[str, Any], kinds: list[str]) -> str:
    """Format a table of disks and a table of servers."""
    of_disks, in_servers = (
        {product: result for product, result in report.items() if (product in IN_SERVERS) is shared}
        for shared in (False, True)
    )
    in_both = [kind for kind in kinds if kind not in OF_FILES]
    tables = [damage_table(of_disks, kinds)] if of_disks else []
    return "\n\n".join([*tables, damage_table(in_servers, in_both)] if in_servers else tables)


def damage_table(report: dict[str, Any], kinds: list[str]) -> str:
    ran = {product: result for product, result in report.items() if result["rows"]}
    head = ["damaged", *(f"{TITLES[product]} {result['version']}" for product, result in ran.items())]
    body = [[kind, *(cell(result["rows"], kind) for result in ran.values())] for kind in kinds]
    wrong = (sum(row.get("wrong", 0) for row in result["rows"]) for result in ran.values())
    totals = ["served wrong, in all", *map(str, wrong)]
    lines = [markdown(head, [*body, totals]), ""]
    for product, result in report.items():
        if "not_run" in result:
            lines.append(f"- {TITLES[product]}: not run: {result['not_run']}")
        else:
            killed = [row for row in result["rows"] if "left_behind" in row]
            files_left = (
                f"; files left behind by killed writers: {killed[0]['left_behind']}" if killed else ""
            )
            lost_blocks = [
                row["acknowledged_and_lost"] for row in result["rows"] if "acknowledged_and_lost" in row
            ]
            lost = (
                f"; acknowledged and not served after a kill or a full disk: {sum(lost_blocks)}"
                if lost_blocks
                else ""
            )
            lines.append(f"- {TITLES[product]}: {result['configuration']}{lost}{files_left}")
    return "\n".join(lines)


def speed_table(report: dict[str, Any]) -> str:
    body = []
    for row in report["rows"]:
        size = row["block_bytes"]
        line = [f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB", TITLES[row["product"]]]
        for operation in TIMED:
            low, middle, high = np.percentile(row["ratios"][operation], (25, 50, 75))
            line.append(f"{middle:.1f} ({low:.1f}-{high:.1f})")
        body.append(line)
    not_run = [f"- {TITLES[product]}: not run: {why}" for product, why in report["not_run"].items()]
    return "\n".join([markdown(["block", "seconds / kvoffload's", *TIMED], body), "", *not_run])


def failed(report: dict[str, Any]) -> bool:
    """Return true if kvoffload served a wrong byte, crashed, raised, or did not run."""
    own_results = [
        result for product, result in report.get("damage", {}).items() if product.startswith("kvoffload")
    ]
    return any(
        "not_run" in result or any(row.get("wrong") or row.get("ended") for row in result["rows"])
        for result in own_results
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--product", action="append", choices=list(MODULES), help="product to run; repeatable"
    )
    parser.add_argument("--kind", action="append", choices=KINDS, help="kind of damage; repeatable")
    parser.add_argument("--what", choices=("all", "damage", "speed"), default="all")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="made by `make vllm-env`")
    parser.add_argument("--lmcache-python", default=".venv-lmcache/bin/python", help="tools/lmcache_env.sh")
    parser.add_argument(
        "--spoolcache-python", default=".venv-spoolcache/bin/python", help="see the docstring of this script"
    )
    parser.add_argument("--engines-python", default=".venv-engines/bin/python", help="tools/engines_env.sh")
    parser.add_argument(
        "--mooncake-python", default=".venv-mooncake/bin/python", help="see the docstring of this script"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=20, help="number of killed writers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown")
    arguments = parser.parse_args()
    pythons = {
        "kvoffload_disk": sys.executable,
        "vllm_fs": arguments.vllm_python,
        "lmcache_fs": arguments.lmcache_python,
        "spoolcache_files": arguments.spoolcache_python,
        "sglang_storage": arguments.engines_python,
        "lmcache_kvoffload": arguments.engines_python,
        "kvoffload_open": sys.executable,
        "kvoffload_transformers": arguments.vllm_python,
        "kvoffload_remote": sys.executable,
        "lmcache_resp": arguments.lmcache_python,
        "vllm_obj": arguments.vllm_python,
        "vllm_simple_disk": arguments.vllm_python,
        "mooncake_files": arguments.mooncake_python,
    }
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    products, kinds = arguments.product or list(MODULES), arguments.kind or list(KINDS)
    bench = Bench(pythons, arguments.directory, seed, arguments.kills)
    report: dict[str, Any] = {"seed": seed, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    report["kernel"] = platform.release()
    if arguments.what != "speed":
        report["damage"] = all_damage(bench, products, kinds)
    if arguments.what != "damage":
        report["speed"] = all_speed(bench, products, arguments.rounds)
    if arguments.format == "json":
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print(f"seed {seed}, {report['cores']} cores, load {report['load']:.1f}, Linux {report['kernel']}\n")
        if "damage" in report:
            print(damage_tables(report["damage"], kinds) + "\n")
        if "speed" in report:
            print(speed_table(report["speed"]))
    sys.exit(failed(report))


if __name__ == "__main__":
    main()
