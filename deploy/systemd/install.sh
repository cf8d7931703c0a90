#!/usr/bin/env bash
# Install or remove vllm-handoff.service.
#
#   deploy/systemd/install.sh install      make the user, put the unit and its settings in place
#   deploy/systemd/install.sh uninstall    stop it and take the unit away; settings, models and the user stay
#   deploy/systemd/install.sh check        let systemd verify the unit and rate its hardening
#
# The package itself is expected in /opt/vllm-handoff, a virtual environment:
#   python3 -m venv /opt/vllm-handoff && /opt/vllm-handoff/bin/pip install 'vllm==0.32.*' vllm-handoff
#
# Settings that exist are kept. DESTDIR puts everything below another folder and leaves the
# system alone, to look at what would be installed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${DESTDIR:-}
unit=$root/etc/systemd/system/vllm-handoff.service
dropins=$unit.d
settings=$root/etc/vllm-handoff

say() { printf 'systemd: %s\n' "$*"; }
fail() { printf 'systemd: %s\n' "$*" >&2; exit 1; }
need_root() { [ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "this needs root: sudo $0 ${1:-}"; }

# Where an image is made, no systemd runs yet.
reload() { if [ -z "$root" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi; }

systemd_version() { { systemd-analyze --version 2>/dev/null || echo systemd 0; } | sed -n '1s/^systemd \([0-9]*\).*/\1/p'; }

install_unit() {
    need_root install
    if [ -z "$root" ]; then
        [ -x /opt/vllm-handoff/bin/vllm-handoff ] || fail "/opt/vllm-handoff/bin/vllm-handoff is missing; $0 --help says how to put it there."
        getent passwd vllm-handoff >/dev/null ||
            useradd --system --user-group --home-dir /var/lib/vllm-handoff --shell /usr/sbin/nologin vllm-handoff
        # The unit names them; they are missing on machines without a desktop.
        getent group video >/dev/null || groupadd --system video
        getent group render >/dev/null || groupadd --system render
    fi
    install -D -m 0644 "$here/vllm-handoff.service" "$unit"
    if [ "$(systemd_version)" -ge 254 ]; then install -D -m 0644 "$here/backoff.conf" "$dropins/backoff.conf"; fi
    install -d -m 0750 "$settings"
    if [ -e "$settings/server.env" ]; then
        say "kept $settings/server.env"
    else
        install -m 0600 "$here/server.env" "$settings/server.env"
    fi
    reload
    say "installed. Set MODEL in $settings/server.env, then: systemctl enable --now vllm-handoff"
}

uninstall_unit() {
    need_root uninstall
    if [ -z "$root" ]; then systemctl disable --now vllm-handoff || true; fi
    rm -f "$unit" "$dropins/backoff.conf"
    rmdir "$dropins" 2>/dev/null || true
    reload
    say "removed. Left: $settings, $root/var/lib/vllm-handoff, the user vllm-handoff"
}

check_unit() {
    # The unit as it is, but for files that only an installation has.
    local folder found
    folder=$(mktemp -d)
    sed -e "s|^ExecStart=[^ ]*|ExecStart=/bin/true|" -e '/^Documentation=/d' "$here/vllm-handoff.service" >"$folder/vllm-handoff.service"
    # It warns of what it does not know, and exits with 0.
    found=$(systemd-analyze verify --man=no "$folder/vllm-handoff.service" 2>&1) || true
    systemd-analyze security --no-pager --offline=true "$folder/vllm-handoff.service" | tail -n 1
    rm -rf "$folder"
    [ -z "$found" ] || fail "systemd-analyze verify: $found"
    say "systemd-analyze verify has nothing to say."
}

case ${1:-} in
    install) install_unit ;;
    uninstall) uninstall_unit ;;
    check) check_unit ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" ;;
    *) fail "give install, uninstall or check (--help says more)" ;;
esac
