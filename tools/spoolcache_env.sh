#!/bin/sh
# Builds a virtual environment with spoolcache 0.3.0 for bench/integrity.py: tools/spoolcache_env.sh DIR
#
# Needs no GPU: its store of files runs without its vLLM connector. PYTHON names the interpreter, 3.11 or later.
set -eu

SPOOLCACHE=0.3.0
TORCH=2.13.0

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
python="$1/bin/python"
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$1"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install "torch==$TORCH" numpy
pip install --no-deps "spoolcache==$SPOOLCACHE"
"$python" -c "
from spoolcache import token_files
from importlib.metadata import version
print('spoolcache-env: done: spoolcache', version('spoolcache'))"
