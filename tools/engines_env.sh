#!/bin/sh
# Builds a virtual environment with SGLang 0.5.23 and LMCache 0.5.6 for their tests: tools/engines_env.sh DIR VLLM_DIR
#
# The new environment uses the packages of VLLM_DIR, an environment of tools/vllm_env.sh, without changes: torch and most
# requirements. The wheels are installed without their requirements, which are GPU builds, and with the packages that the
# tests import. Takes half a minute and 330 MB. Does nothing if the environment is complete.
set -eu

SGLANG=0.5.23
LMCACHE=0.5.6
TORCHVISION=0.28.0  # for torch 2.13

if [ $# -ne 2 ]; then
    echo "usage: $0 DIR VLLM_DIR" >&2
    exit 2
fi
project=$(cd "$(dirname "$0")/.." && pwd)
below=$(cd "$2" && pwd)
mkdir -p "$1"
env=$(cd "$1" && pwd)
python="$env/bin/python"

say() { echo "engines-env: $*"; }

complete() {
    [ -x "$python" ] && [ -x "$env/bin/rclone" ] && LMCACHE_TRACK_USAGE=false "$python" -W ignore - "$SGLANG" "$LMCACHE" "$project" <<'PY' 2>/dev/null
import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

assert (version("sglang"), version("lmcache")) == (sys.argv[1], sys.argv[2])
for needed in ("torch", "pytest", "gguf", "orjson", "IPython", "torchvision", "aiofile", "sortedcontainers"):
    assert importlib.util.find_spec(needed), needed
assert Path(sys.argv[3]) in Path(importlib.util.find_spec("kvoffload").origin).resolve().parents
PY
}

if complete; then
    say "$env is complete: sglang $SGLANG, lmcache $LMCACHE. Nothing to do."
    exit 0
fi
[ -x "$python" ] || "$below/bin/python" -m venv "$env"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below_site=$("$below/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# SGLang imports torchvision for images. Its compiled operators may not fit a CPU build of torch; this line, executed at
# the start of Python, omits the module that registers them.
stub='import sys, types; sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("stub"))'
printf '%s\n' "$below_site" "$project/src" "$stub" > "$site/below.pth"
ln -sf "$below/bin/rclone" "$env/bin/rclone"  # the tests' bucket
say "installing sglang $SGLANG, lmcache $LMCACHE and their imports"
"$python" -m pip --quiet --disable-pip-version-check install --no-deps "sglang==$SGLANG" "lmcache==$LMCACHE" \
    "torchvision==$TORCHVISION" gguf orjson ipython ipython-pygments-lexers traitlets decorator jedi parso \
    matplotlib-inline prompt-toolkit wcwidth stack-data executing asttokens pure-eval pexpect ptyprocess \
    aiofiles aiofile caio sortedcontainers
if ! complete; then
    say "FAILED: $env is not complete" >&2
    exit 1
fi
say "done: sglang $SGLANG, lmcache $LMCACHE"
