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
for folder in executor worker scheduler_ext benchmarks stress simulator; do
    if [ -f "$folder/__init__.py" ]; then ln -s "../../../$folder" "$tree/vllm_handoff/$folder"; fi
done
types() {
    "$bin/mypy" --cache-dir .cache/mypy "$@" | sed "s|^$tree/vllm_handoff/||"
}
export MYPYPATH=$tree:tools
types -p vllm_handoff || status=1
types tools/*.py || status=1
# Folder by folder, as pytest imports them: two folders may each have a conftest.py. Tests give stand-ins for real things.
loose=(--disable-error-code arg-type --disable-error-code list-item --disable-error-code var-annotated)
while read -r folder; do
    MYPYPATH=$tree:tools:tests:$folder types --follow-imports silent "${loose[@]}" "$folder"/*.py || status=1
done < <(find tests -name '*.py' -printf '%h\n' | sort -u)
exit $status
