#!/bin/sh
# Unpacks the Python files of a vLLM wheel, to test against a version without a CPU build:
#
#     tools/vllm_sources.sh DIR [VERSION]
#
# The version is 0.33.0 by default: a download of 336 MB, 61 MB unpacked, without compiled parts. With DIR in
# PYTHONPATH, an environment of another version imports these files; engines cannot start. Does nothing if DIR
# is complete. Called by `make test-vllm-sources`.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 DIR [VERSION]" >&2
    exit 2
fi
version=${2:-0.33.0}
[ ! -e "$1/complete-$version" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "vllm-sources: downloading vllm $version"
"${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
    --dest "$work" "vllm==$version"
mkdir -p "$1"
"${PYTHON:-python3}" - "$work" "$1" <<'PY'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    wanted = [name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
    archive.extractall(sys.argv[2], wanted)
PY
touch "$1/complete-$version"
