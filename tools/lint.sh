#!/usr/bin/env bash
# Check style (ruff) and types (mypy).
#
#   tools/lint.sh           check
#   tools/lint.sh --fix     let ruff mend and format what it can, then check
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${VENV:-.venv}/bin

case ${1:-} in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --fix) "$bin/ruff" check --quiet --fix . || true; "$bin/ruff" format --quiet . ;;
esac

# Every check runs, so that one look shows everything that is wrong.
status=0
"$bin/ruff" check . || status=1
"$bin/ruff" format --check . || status=1

# mypy does not read [tool.setuptools.package-dir]: show it the package as it is imported.
tree=.cache/typecheck
rm -rf "$tree" && mkdir -p "$tree/vllm_handoff"
for folder in executor worker scheduler_ext benchmarks stress; do
    if [ -f "$folder/__init__.py" ]; then ln -s "../../../$folder" "$tree/vllm_handoff/$folder"; fi
done
types() {
    # As pytest imports helpers: each folder of tests is a root of its own.
    local roots
    roots=$tree:tools:$(find tests -type d ! -name __pycache__ | paste -sd:)
    MYPYPATH=$roots "$bin/mypy" --cache-dir .cache/mypy "$@" | sed "s|^$tree/vllm_handoff/||"
}
types -p vllm_handoff || status=1
types tools tests || status=1
exit $status
