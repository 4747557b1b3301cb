"""Builds wheels and sdist, checks their content, and tests the wheels in empty environments.

    python tools/packages.py [--pythons 3.10,3.13] [--numbas 0.65.0] [--torch 3.11] [--lowest 3.10] [--upload]
        [--kernels FOLDER]

Owns the requirements of a release: its files, its page on PyPI, and the commands that must work in an empty
environment. Knows nothing of the package except its commands. `make dist` runs it with the group `dist` of
pyproject.toml. The files stay in dist/: the sdist, a wheel without kernels for every Python, and for each
Python a wheel with compiled kernels, with which the first command compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from platform_wheels import FOLDER, platform_wheel

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
BESIDE_THE_CODE = (
    "README.md",
    "CITATION.cff",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "tests/conftest.py",
    "Makefile",
)
CITATION_CHECKER = "cffconvert==2.0.0"
LIMIT_S = 900
VLLM_PINS_NUMBA = "0.65.0"
"""Version of numba in vLLM 0.30 to 0.33."""
TRACE = "".join(
    f'{{"timestamp":{n},"input_length":2048,"output_length":9,"hash_ids":[0,1,{n % 3 + 2},{9 + n % 15}]}}\n'
    for n in range(60)
)
EVERY_NAME = (
    "import kvoffload, sys; [getattr(kvoffload, name) for name in kvoffload.__all__];"
    "print(len(kvoffload.__all__), 'names,', 'with torch' if 'torch' in sys.modules else 'without torch')"
)
COUNT_PASSES = """
from numba.core import event
passes = event.RecordingListener()
event.register("numba:run_pass", passes)
from kvoffload.cli.warm import compile_package
print(compile_package(), len(passes.buffer))
"""
"""Prints the number of kernels, and the number of compiler passes that numba needed for them."""
KERNELS_NAME = (
    "import sysconfig, numba;"
    "print(f'{sysconfig.get_config_var(\"SOABI\")}.numba-{numba.__version__}.kernels')"
)
"""Prints the name of an environment's file of kernels."""
WITH_TORCH = (
    "import numpy, torch, kvoffload; tier = kvoffload.MemoryTier(4, 256);"
    "cache = torch.arange(1024, dtype=torch.uint8).reshape(4, 256); kept = cache.clone();"
    "keys = kvoffload.Keys.pack([bytes([n]) * 32 for n in range(4)], key_bytes=32);"
    "slots = numpy.arange(4, dtype=numpy.int32); tier.write(keys, slots, cache, slots); cache.zero_();"
    "assert tier.read(keys, slots, cache, slots).all() and cache.equal(kept); tier.close();"
    "print('tensors are kept')"
)


class Unfit(SystemExit):
    """The package cannot be released; the message is the reason."""


def main() -> None:
    arguments = parsed()
    started = time.monotonic()
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvoffload-packages-") as name:
        folder = Path(name)
        wheel, sdist = built(ROOT, ROOT / "dist")
        look_into_wheel(wheel)
        look_into_sdist(sdist, wheel, folder)
        look_at_page(wheel, sdist)
        look_at_citation(wheel, folder)
        if arguments.upload:
            ready_to_upload(wheel)
        for version in sorted({*arguments.pythons, *arguments.torch, *arguments.lowest}):
            python = interpreter(version)
            if python is None:
                log(f"Python {version} is not installed: not tested")
                continue
            best = wheel
            if version in arguments.pythons:
                best = with_kernels(python, version, wheel, folder, arguments.numbas, arguments.kernels)
            if best != wheel:
                look_into_platform_wheel(best, wheel)
                first_replay(
                    python, version, best, folder, arguments.numbas, torch=version in arguments.torch
                )
            elif version in arguments.torch:
                smoke(python, version, best, folder, torch=True)
            if version in arguments.lowest:
                smoke(python, version, best, folder, lowest=True)
    log(f"fit for release, after {time.monotonic() - started:.0f} s")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, text in (
        ("--pythons", ",".join(SUPPORTED), "versions of Python to compile kernels for, and to test"),
        (
            "--numbas",
            VLLM_PINS_NUMBA,
            "versions of numba to compile kernels for, besides the newest; half a minute each",
        ),
        ("--torch", "", "versions of Python to test with torch"),
        ("--lowest", "", "versions of Python to test with the lowest version of each dependency"),
    ):
        parser.add_argument(
            name,
            default=default,
            type=lambda value: [item for item in value.split(",") if item],
            help=f"{text}  [default: {default or 'none'}]",
        )
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="FOLDER",
        help="folder of kernels that tools/record_kernels.py compiled from this tree",
    )
    parser.add_argument("--upload", action="store_true", help="also check that the release is ready for PyPI")
    return parser.parse_args()


def built(source: Path, output: Path) -> tuple[Path, Path]:
    """Build the sdist of a tree, and the wheel from the sdist, as users' tools do."""
    run(sys.executable, "-m", "build", "--outdir", str(output), str(source))
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    log("built " + " and ".join(f"{file.name} ({file.stat().st_size >> 10} KiB)" for file in (wheel, sdist)))
    return wheel, sdist


def look_into_wheel(wheel: Path) -> None:
    """Check that the wheel contains every file of the package, the licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata_names = {name.partition("/")[2] for name in archive.namelist() if ".dist-info/" in name}
    tracked = run("git", "ls-files", "src", cwd=ROOT).split()
    wanted = {name.removeprefix("src/") for name in tracked}
    if held != wanted:
        raise Unfit(f"wheel: missing files {sorted(wanted - held)}, unexpected {sorted(held - wanted)}")
    if "kvoffload/py.typed" not in held or "licenses/LICENSE" not in metadata_names:
        raise Unfit("the wheel lacks py.typed or its licence")
    log(f"the wheel has the {len(held)} files of the package, including py.typed, and no tests")


def look_into_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """Check that the unpacked sdist builds the same wheel, byte by byte."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        if sys.version_info >= (3, 12):
            archive.extractall(folder / "sdist", filter="data")
        else:
            archive.extractall(folder / "sdist")
    missing = [name for name in BESIDE_THE_CODE if name not in names]
    if missing:
        raise Unfit(f"the sdist lacks {missing}")
    (unpacked,) = (folder / "sdist").iterdir()
    again, _ = built(unpacked, folder / "again")
    if again.read_bytes() != wheel.read_bytes():
        raise Unfit("the sdist builds a different wheel")
    log("the sdist builds the same wheel, byte by byte")


def look_at_page(wheel: Path, sdist: Path) -> None:
    """Check that the page on PyPI renders and has no broken link."""
    from readme_renderer import markdown

    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    page = markdown.render(str(metadata(wheel).get_payload()))
    if page is None:
        raise Unfit("the long description does not render")
    known = ("http", *(f"#{anchor}" for anchor in re.findall(r'id="([^"]*)"', page)))
    relative = [link for link in re.findall(r'(?:href|src)="([^"]*)"', page) if not link.startswith(known)]
    if relative:
        raise Unfit(f"the long description has links that are broken on PyPI: {relative}")
    log("the long description renders, and has no broken link")


def look_at_citation(wheel: Path, folder: Path) -> None:
    """Check that CITATION.cff follows its schema, and cites this version.

    cffconvert runs in a separate environment, because it needs jsonschema below 4, and the tests do not.
    """
    home, citation = folder / "env-citation", ROOT / "CITATION.cff"
    run(sys.executable, "-m", "venv", str(home))
    run(str(home / "bin/pip"), "install", "--quiet", CITATION_CHECKER)
    run(str(home / "bin/cffconvert"), "--validate", "--infile", str(citation))
    text = citation.read_text()
    if f"\nversion: {metadata(wheel)['Version']}\n" not in text:
        raise Unfit(f"CITATION.cff does not cite version {metadata(wheel)['Version']}")
    log("CITATION.cff is valid")


def metadata(wheel: Path) -> Message:
    """Read the wheel's metadata; the body is the long description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def ready_to_upload(wheel: Path) -> None:
    """Check the decisions of people: a repository address, and a released version in the change log."""
    data = metadata(wheel)
    missing = []
    if not data.get_all("Project-URL"):
        missing.append("[project.urls] in pyproject.toml is empty: add the repository")
    if f"## {data['Version']} (unreleased)" in (ROOT / "CHANGELOG.md").read_text():
        missing.append(f"CHANGELOG.md calls {data['Version']} unreleased")
    if missing:
        raise Unfit("not ready for PyPI: " + "; ".join(missing))


def interpreter(version: str) -> str | None:
    """Find a Python of that version on the path or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    for candidate in filter(None, candidates):
        command = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    return None


def lowest_versions(wheel: Path) -> list[str]:
    """Pin each direct dependency to the lowest version that the wheel accepts: ``numpy==1.26``."""
    pins = []
    for requirement in metadata(wheel).get_all("Requires-Dist") or []:
        name_and_version, _, marker = requirement.partition(";")
        if "extra" not in marker:
            if not re.fullmatch(r"[\w.-]+>=[\d.]+", name_and_version.strip()):
                raise Unfit(f"{requirement}: no lowest version")
            pins.append(name_and_version.strip().replace(">=", "==") + (f";{marker}" if marker else ""))
    return pins


def with_kernels(
    python: str, version: str, wheel: Path, folder: Path, numbas: list[str], given: Path | None
) -> Path:
    """Test the wheel in an empty environment, compile its kernels there, and return the wheel with kernels.

    Kernels in `given` are not compiled again; `first_replay` fails if they do not fit. On platforms other
    than Linux on x86-64, returns the given wheel, which compiles its kernels at the first start.
    """
    home = smoke(python, version, wheel, folder, keep=True)
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        log(f"no kernels for {sys.platform} on {os.uname().machine}: the first start compiles them")
        return wheel
    started = time.monotonic()
    lines = []
    for numba in ("", *numbas):
        if numba:
            run(str(home / "bin/pip"), "install", "--quiet", f"numba=={numba}", cwd=folder)
        own = run(str(home / "bin/python"), "-c", KERNELS_NAME, cwd=folder).strip()
        if given is not None and (given / own).is_file():
            (home / "kernels").mkdir(exist_ok=True)
            shutil.copy(given / own, home / "kernels")
            lines += [f"{own}: given"]
            continue
        recorder = str(ROOT / "tools/record_kernels.py")
        lines += [run(str(home / "bin/python"), recorder, str(home / "kernels"), cwd=folder).strip()]
    best = platform_wheel(wheel, list((home / "kernels").iterdir()), version)
    shutil.rmtree(home)
    took = time.monotonic() - started
    log(f"{best.name} ({best.stat().st_size >> 10} KiB): {'; '.join(lines)}; {took:.0f} s")
    return best


def look_into_platform_wheel(best: Path, wheel: Path) -> None:
    """Check that the wheel contains the files of the pure wheel and kernels, with correct digests."""
    with zipfile.ZipFile(best) as archive, zipfile.ZipFile(wheel) as pure:
        added = set(archive.namelist()) - set(pure.namelist())
        equal = [
            name for name in pure.namelist() if not name.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))
        ]
        if not added or not all(name.startswith(FOLDER) for name in added):
            raise Unfit(f"{best.name}: unexpected files {sorted(added)}")
        if any(archive.read(name) != pure.read(name) for name in equal):
            raise Unfit(f"{best.name}: files differ from the wheel without kernels")
    run(sys.executable, "-m", "twine", "check", "--strict", str(best))


def first_replay(
    python: str, version: str, wheel: Path, folder: Path, numbas: list[str], *, torch: bool
) -> None:
    """Install from dist/ into an empty environment; the first `kvoffload replay` must compile nothing.

    Repeats this with every kernel and the other versions of numba, and finally with torch, if `torch`.
    """
    home, seconds = folder / f"env-{version}-first", []
    run(python, "-m", "venv", str(home))
    places = ("--no-index", "--no-deps", "--find-links", str(wheel.parent))
    run(str(home / "bin/pip"), "install", "--quiet", *places, "kvoffload", cwd=folder)  # pip chooses
    run(str(home / "bin/pip"), "install", "--quiet", "kvoffload", cwd=folder)
    for numba in ("", *numbas):
        if numba:
            run(str(home / "bin/pip"), "install", "--quiet", f"numba=={numba}", cwd=folder)
        (folder / "trace.jsonl").write_text(TRACE)
        began = time.monotonic()
        replayed(home, folder, HOME=str(home / "of-user"))
        seconds.append(time.monotonic() - began)
        passes = run(
            str(home / "bin/python"), "-I", "-c", COUNT_PASSES, cwd=folder, HOME=str(home / "of-user")
        )
        kept = list(home.rglob("*.nb[ic]"))
        if kept or not re.fullmatch(r"[1-9]\d* 0", passes.strip()):
            raise Unfit(
                f"Python {version}, numba {numba or 'newest'}: {passes.strip()} passes, {len(kept)} files"
            )
    if torch:
        run(str(home / "bin/pip"), "install", "--quiet", f"{wheel}[torch]", cwd=folder)
        output = run(str(home / "bin/python"), "-I", "-c", WITH_TORCH, cwd=folder).strip()
        log(f"Python {version}: {output}")
    shutil.rmtree(home)
    times = ", ".join(
        f"{took:.1f} s (numba {numba})" for took, numba in zip(seconds, ("newest", *numbas), strict=True)
    )
    log(f"Python {version}: the first replay compiles nothing: {times}")


def replayed(home: Path, folder: Path, **environment: str) -> None:
    """Replay a trace with the command of an environment; no block may be wrong."""
    own = str(home / "bin/kvoffload")
    output = run(own, "replay", "trace.jsonl", "--capacity", "6", "--quiet", cwd=folder, **environment)
    if not re.search(r"mismatches served +0", output):
        raise Unfit(f"the replay served wrong blocks: {output}")


def smoke(
    python: str,
    version: str,
    wheel: Path,
    folder: Path,
    *,
    torch: bool = False,
    lowest: bool = False,
    keep: bool = False,
) -> Path:
    """Install the wheel into an empty environment, and run a new user's first commands.

    Returns the environment. With the lowest versions a replay compiles kernels, because the wheel has none
    for the lowest numba. They are not optimized, to save time.
    """
    started = time.monotonic()
    home = folder / f"env-{version}{'-torch' if torch else ''}{'-lowest' if lowest else ''}"
    run(python, "-m", "venv", str(home))
    pins = lowest_versions(wheel) if lowest else []
    wanted = f"{wheel}[torch]" if torch else str(wheel)
    run(str(home / "bin/pip"), "install", "--quiet", wanted, *pins, cwd=folder)
    run(str(home / "bin/pip"), "check", cwd=folder)
    own = str(home / "bin/kvoffload")
    output = run(own, "--version", cwd=folder)
    if str(metadata(wheel)["Version"]) not in output:
        raise Unfit(f"--version prints {output!r}")
    for command in (
        ("--help",),
        ("policies",),
        ("vllm-config", "--ram", "1GiB"),
        ("trace", "info", "trace.jsonl"),
    ):
        (folder / "trace.jsonl").write_text(TRACE)
        run(own, *command, cwd=folder)
    names = run(str(home / "bin/python"), "-I", "-c", EVERY_NAME, cwd=folder).strip()
    if torch:
        names += ", " + run(str(home / "bin/python"), "-I", "-c", WITH_TORCH, cwd=folder).strip()
    if lowest:
        (folder / "trace.jsonl").write_text(TRACE)
        replayed(home, folder, NUMBA_OPT="0")
        if not list(home.rglob("*.nbi")):
            raise Unfit("the replay compiled nothing, but the wheel has no kernels for this numba")
        names += ", a replay that compiles kernels"
    names += f", with {', '.join(pins)}" if lowest else ""
    if not keep:
        shutil.rmtree(home)
    log(f"Python {version}: installs, starts ({names}), {time.monotonic() - started:.0f} s")
    return home


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """Run a command without variables of Python, kvoffload and numba; returns its output."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    outside = {
        name: value for name, value in outside.items() if not name.startswith(("KVOFFLOAD_", "NUMBA_"))
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env=outside | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Unfit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def log(text: str) -> None:
    print(f"packages: {text}", flush=True)


if __name__ == "__main__":
    main()
