#!/bin/sh
# Runs tests/vllm with one version of vLLM after the other: tools/vllm_versions.sh DIR [VERSION...]
#
# Creates in DIR one environment at a time (3.4 to 6.1 GB, removed after its tests), VERSION.log with the reasons
# of skipped tests, and results.txt with a line per version. Called by `make test-vllm-versions`. Takes about
# eight minutes per version on an idle machine with two cores. Fails at the end if the tests of a version failed.
# An environment that cannot be built also has a line, and the reason in its log.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: $0 DIR [VERSION...]" >&2
    exit 2
fi
project=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
work=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- 0.32.0 0.31.0 0.30.0 0.29.0 0.28.0 0.27.0 0.26.0 0.25.0

env=
trap '[ -z "$env" ] || rm -rf "$env"' EXIT
trap 'exit 1' INT TERM
status=0
for version in "$@"; do
    log="$work/$version.log" xml="$work/$version.xml" env="$work/env-$version"
    rm -f "$xml"
    echo "vllm-versions: $version"
    if bash "$project/tools/vllm_env.sh" "$env" "$version" > "$log" 2>&1; then
        (cd "$project" && "$env/bin/python" -m pytest tests/vllm -q -p no:cacheprovider --junitxml="$xml") \
            >> "$log" 2>&1 || status=1
        "$env/bin/python" - "$version" "$xml" <<'PY' | tee -a "$work/results.txt" || status=1
import datetime
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

vllm, xml = sys.argv[1:]
about = f"vllm {vllm}  torch {version('torch')}  python {platform.python_version()}"
today = datetime.datetime.now(datetime.timezone.utc).date()
if not Path(xml).exists():
    sys.exit(print(f"{today}  {about}  the tests did not end") or 1)
suite = ElementTree.parse(xml).getroot().find("testsuite").attrib
total, skipped, failed, errors = (int(suite[name]) for name in ("tests", "skipped", "failures", "errors"))
print(
    f"{today}  {about}  passed {total - skipped - failed - errors}  skipped {skipped}  failed {failed + errors}"
    f"  seconds {float(suite['time']):.0f}"
)
PY
    else
        status=1
        echo "$(date -u +%F)  vllm $version  no environment: $(tail -n 1 "$log")" | tee -a "$work/results.txt"
    fi
    rm -rf "$env"
    env=
done
exit $status
