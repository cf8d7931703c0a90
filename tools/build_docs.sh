#!/usr/bin/env bash
# Build the documentation site into .cache/site; a link or an anchor that leads nowhere ends it with an error.
#
#   tools/build_docs.sh            build and check
#   tools/build_docs.sh serve      show it on http://127.0.0.1:8001, built anew when a page changes
#
# mkdocs comes from PyPI, into .cache/docs-env.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
env=.cache/docs-env
case ${1:-build} in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
if [ ! -x "$env/bin/mkdocs" ]; then
    "${VENV:-.venv}/bin/python" -m venv "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check mkdocs==1.6.1
fi
case ${1:-build} in
    build) "$env/bin/mkdocs" build --strict --clean ;;
    serve) "$env/bin/mkdocs" serve --strict --dev-addr 127.0.0.1:8001 ;;
    *) echo "give build or serve (--help says more)" >&2; exit 2 ;;
esac
