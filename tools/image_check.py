"""What examples/Containerfile promises, without a container engine: a start of the image compiles nothing.

Runs the RUN steps of that file in an environment of its own, with the numba that vLLM pins; packs and unpacks
it as a layer is (times in whole seconds); mounts it read-only; and starts it as a user that nobody knows,
without a home. Then for another processor. Once with the wheel without kernels, which must compile for the
other processor (a negative control), and once with all wheels: the one with kernels for this Python, if it is
among them, must compile nothing. Needs root and Linux.

    python tools/image_check.py dist/kvoffload-*.whl [--numba 0.65.0] [--python /usr/bin/python3]
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
"""For the negative control, which need not compile all kernels."""
_COMPILED = re.compile(r"^\[cache\] data saved to", re.M)
_FOUND = re.compile(r"^\[cache\] data loaded from", re.M)


def steps() -> tuple[dict[str, str], list[str]]:
    """The environment and the commands of the file; what ARG says by default is put in."""
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    arguments = dict(re.findall(r"^ARG (\w+)=(\S*)", text, re.M))
    environment = {}
    for line in re.findall(r"^ENV (.*)", text, re.M):
        for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', line):
            environment[name] = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], value.strip('"'))
    return environment, re.findall(r"^RUN (.*)", text, re.M)


def build(image: Path, options: argparse.Namespace, given: list[Path]) -> dict[str, str]:
    """Run the steps where ``python3`` and ``uv pip install --system`` are those of an environment."""
    environment, commands = steps()
    subprocess.run([options.python, "-m", "venv", "--copies", image], check=True)
    subprocess.run(
        [image / "bin/pip", "install", "--quiet", "--compile", f"numba=={options.numba}"], check=True
    )
    inside = {"PATH": f"{image}/bin:/usr/bin:/bin:/usr/sbin:/sbin", **environment}
    wheels = image / "wheels"
    wheels.mkdir()
    for wheel in given:
        (wheels / wheel.name).write_bytes(wheel.read_bytes())
    for command in commands:
        here = command.replace("uv pip install --system", "pip install --quiet")
        here = here.replace("/tmp/kvoffload", str(wheels))
        subprocess.run(["sh", "-euc", here], env=inside, check=True)
    return environment


def as_a_layer(image: Path) -> None:
    """Pack and unpack it: a layer's times are whole seconds, and so are those of this format."""
    archive = image.with_suffix(".tar")
    subprocess.run(["tar", "--format=gnu", "-C", image.parent, "-cf", archive, image.name], check=True)
    subprocess.run(["rm", "-r", image], check=True)
    subprocess.run(["tar", "-C", image.parent, "-xf", archive], check=True)
    archive.unlink()


def start(image: Path, environment: dict[str, str], code: str = START) -> tuple[int, int, float]:
    """Kernels compiled, kernels found, and CPU seconds until there is a manager."""
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
        raise SystemExit(f"image: it does not start: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    spent = re.search(r"START ([\d.]+)", done.stdout)
    assert spent, done.stdout
    return len(_COMPILED.findall(done.stdout)), len(_FOUND.findall(done.stdout)), float(spent[1])


def anybody_may_run(python: str) -> bool:
    """Whether it is a Python that we support, and that a user nobody knows may run."""
    asked = ["setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups", python, "-c"]
    asked += ["import sys, venv; sys.exit(sys.version_info < (3, 10))"]
    return subprocess.run(asked, capture_output=True, cwd="/", check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--numba", default="0.65.0", help="vLLM 0.32 pins this one")
    parser.add_argument("--python", help="one that every user may run  [default: this, or the system's]")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid():
        print("image: not checked: mounting and changing the user need root, and Linux")
        return
    candidates = [options.python] if options.python else [sys.executable, "/usr/bin/python3"]
    options.python = next(filter(anybody_may_run, candidates), None)
    if options.python is None:
        print(f"image: not checked: user {USER} can run none of {', '.join(candidates)}")
        return
    pure = [wheel for wheel in options.wheels if wheel.name.endswith("-none-any.whl")]
    check(options, pure, has_kernels=False)
    asked = [options.python, "-c", "import sys; print('-cp%d%d-' % sys.version_info[:2])"]
    tag = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if any(tag in wheel.name for wheel in options.wheels):
        check(options, options.wheels, has_kernels=True)
    else:
        print(f"image: no wheel has kernels for {options.python} ({tag.strip('-')}): not checked")


def check(options: argparse.Namespace, wheels: list[Path], has_kernels: bool) -> None:
    """Build an image with the best of the wheels; start it as it is, and for another processor."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        image = folder / "image"
        began = time.monotonic()
        environment = build(image, options, wheels)
        as_a_layer(image)
        which = "a wheel with kernels" if has_kernels else "the wheel without kernels"
        print(f"image: {which}, built with {environment}, {time.monotonic() - began:.0f} s", flush=True)
        compiled, found, spent = start(image, environment)
        print(
            f"image: as it is: {compiled} kernels compiled, {found} found; {spent:.1f} s of CPU to a manager"
        )
        if compiled or not (found or has_kernels):
            raise SystemExit("image: a start compiles")
        compiled, found, spent = start(image, {}, START if has_kernels else FEW_KERNELS)
        print(f"image: for another processor: {compiled} compiled, {found} found; {spent:.1f} s of CPU")
        if has_kernels and compiled:
            raise SystemExit("image: a start with kernels of the wheel compiles")
        if not (has_kernels or compiled):
            raise SystemExit("image: the control has compiled nothing: this check would not notice")


if __name__ == "__main__":
    main()
