"""Check of examples/Containerfile without a container engine: a start of the image must compile nothing.

    python tools/image_check.py dist/kvoffload-*.whl [--numba 0.65.0] [--python /usr/bin/python3]

Runs the RUN steps of the file in a new environment, with the numba that vLLM pins. Packs and unpacks it like
a layer (times in whole seconds), mounts it read-only, and starts it as an unknown user without a home, for
this processor and for another one. The wheel without kernels must compile for the other processor (negative
control). The wheel with kernels for this Python, if given, must compile nothing. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USER = 12345
CONTAINERFILE = ROOT / "examples" / "Containerfile"
START = """
import json, sys, time
began = time.process_time()
from kvoffload import MemoryTier, OffloadingManager
OffloadingManager(1000, key_bytes=32, policy="hazard")
print("START", json.dumps(time.process_time() - began))
sys.argv = ["kvoffload", "replay", "agent", "--no-data", "--quiet", "--format", "json"]
from kvoffload.cli.main import main
main()
"""
FEW_KERNELS = """
import time
from kvoffload.structures.index import Index
from kvoffload.structures.jit import compile_all
compile_all()
print("START", time.process_time())
"""
"""Start for the negative control: compiles only some kernels."""
_COMPILED = re.compile(r"^\[cache\] data saved to", re.M)
_FOUND = re.compile(r"^\[cache\] data loaded from", re.M)


def steps() -> tuple[dict[str, str], list[str]]:
    """Read the environment and the commands of the file, with the defaults of ARG inserted."""
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    arguments = dict(re.findall(r"^ARG (\w+)=(\S*)", text, re.M))
    environment = {}
    for line in re.findall(r"^ENV (.*)", text, re.M):
        for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', line):
            environment[name] = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], value.strip('"'))
    return environment, re.findall(r"^RUN (.*)", text, re.M)


def build(image: Path, options: argparse.Namespace, wheel_files: list[Path]) -> dict[str, str]:
    """Run the steps with the ``python3`` and pip of a new environment; returns the file's environment."""
    environment, commands = steps()
    subprocess.run([options.python, "-m", "venv", "--copies", image], check=True)
    subprocess.run(
        [image / "bin/pip", "install", "--quiet", "--compile", f"numba=={options.numba}"], check=True
    )
    inside = {"PATH": f"{image}/bin:/usr/bin:/bin:/usr/sbin:/sbin", **environment}
    wheels = image / "wheels"
    wheels.mkdir()
    for wheel in wheel_files:
        (wheels / wheel.name).write_bytes(wheel.read_bytes())
    for command in commands:
        local = command.replace("uv pip install --system", "pip install --quiet")
        local = local.replace("/tmp/kvoffload", str(wheels))
        subprocess.run(["sh", "-euc", local], env=inside, check=True)
    return environment


def as_a_layer(image: Path) -> None:
    """Pack and unpack the image in a format with times in whole seconds, as in a layer."""
    archive = image.with_suffix(".tar")
    subprocess.run(["tar", "--format=gnu", "-C", image.parent, "-cf", archive, image.name], check=True)
    subprocess.run(["rm", "-r", image], check=True)
    subprocess.run(["tar", "-C", image.parent, "-xf", archive], check=True)
    archive.unlink()


def start(image: Path, environment: dict[str, str], code: str = START) -> tuple[int, int, float]:
    """Start the image; returns kernels compiled, kernels loaded, and CPU seconds until a manager exists."""
    place = shlex.quote(str(image))
    command = (
        f"mount --bind {place} {place} && mount -o remount,ro,bind {place} && mount -t tmpfs tmpfs /dev/shm"
        f" && ! touch {place}/x 2>/dev/null && exec setpriv --reuid={USER} --regid=0 --clear-groups"
        f" {place}/bin/python3 -c {shlex.quote(code)}"
    )
    inside = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "NUMBA_DEBUG_CACHE": "1", **environment}
    inside |= {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", command], env=inside, capture_output=True, text=True, cwd="/"
    )
    if done.returncode:
        raise SystemExit(f"image: the start failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    spent = re.search(r"START ([\d.]+)", done.stdout)
    assert spent, done.stdout
    return len(_COMPILED.findall(done.stdout)), len(_FOUND.findall(done.stdout)), float(spent[1])


def anybody_may_run(python: str) -> bool:
    """Return true if the Python is supported and an unknown user may run it."""
    command = ["setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups", python, "-c"]
    command += ["import sys, venv; sys.exit(sys.version_info < (3, 10))"]
    return subprocess.run(command, capture_output=True, cwd="/", check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--numba", default="0.65.0", help="version of numba; the default is vLLM's pin")
    parser.add_argument("--python", help="a Python that every user may run  [default: this, or the system's]")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid():
        print("image: not checked: mounting and changing the user need root, and Linux")
        return
    candidates = [options.python] if options.python else [sys.executable, "/usr/bin/python3"]
    options.python = next(filter(anybody_may_run, candidates), None)
    if options.python is None:
        print(f"image: not checked: user {USER} cannot run {' or '.join(candidates)}")
        return
    pure = [wheel for wheel in options.wheels if wheel.name.endswith("-none-any.whl")]
    check(options, pure, has_kernels=False)
    command = [options.python, "-c", "import sys; print('-cp%d%d-' % sys.version_info[:2])"]
    tag = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if any(tag in wheel.name for wheel in options.wheels):
        check(options, options.wheels, has_kernels=True)
    else:
        print(f"image: no wheel has kernels for {options.python} ({tag.strip('-')}): not checked")


def check(options: argparse.Namespace, wheels: list[Path], has_kernels: bool) -> None:
    """Build an image with the best wheel; start it for this processor and for another one."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        image = folder / "image"
        began = time.monotonic()
        environment = build(image, options, wheels)
        as_a_layer(image)
        kind = "a wheel with kernels" if has_kernels else "the wheel without kernels"
        print(f"image: {kind}, built with {environment}, {time.monotonic() - began:.0f} s", flush=True)
        compiled, loaded, spent = start(image, environment)
        print(
            f"image: this processor: {compiled} kernels compiled, {loaded} loaded; "
            f"{spent:.1f} s of CPU to a manager"
        )
        if compiled or not (loaded or has_kernels):
            raise SystemExit("image: a start compiles kernels")
        compiled, loaded, spent = start(image, {}, START if has_kernels else FEW_KERNELS)
        print(f"image: another processor: {compiled} compiled, {loaded} loaded; {spent:.1f} s of CPU")
        if has_kernels and compiled:
            raise SystemExit("image: a start with the wheel's kernels compiles kernels")
        if not (has_kernels or compiled):
            raise SystemExit("image: the negative control compiled nothing: the check is not sensitive")


if __name__ == "__main__":
    main()
