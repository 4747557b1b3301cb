#!/bin/sh
# Builds a virtual environment with LMCache 0.5.6 for bench/integrity.py: tools/lmcache_env.sh DIR
#
# Needs no GPU. The wheel is installed without its requirements, which are CUDA packages, and with the imports of
# its `fs` adapters. PYTHON is the interpreter, python3 by default.
set -eu

LMCACHE=0.5.6
TORCH=2.13.0

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
python="$1/bin/python"
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$1"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

echo "lmcache-env: installing torch $TORCH"
pip install "torch==$TORCH"
echo "lmcache-env: installing lmcache $LMCACHE and the imports of its fs adapters"
pip install aiofiles aiohttp cachetools cryptography msgspec numba "numpy<=2.2.6" "opentelemetry-api<=1.40.0" \
    opentelemetry-sdk "prometheus_client<=0.24.1" psutil py-cpuinfo pyyaml pyzmq requests safetensors \
    sortedcontainers
pip install --no-deps "lmcache==$LMCACHE"
LMCACHE_TRACK_USAGE=false "$python" -c "
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, fs_native_l2_adapter
from importlib.metadata import version
print('lmcache-env: done: lmcache', version('lmcache'))"
