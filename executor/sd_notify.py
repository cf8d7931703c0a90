"""systemd's readiness and watchdog protocol, sd_notify(3): one datagram to the socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import contextlib
import os
import socket


class Notifier:
    """Tells systemd how the service is; does nothing outside a unit of Type=notify.

    Takes the variables out of the environment, so that child processes do not notify too.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        # "@name" is a socket in the abstract namespace, whose address begins with a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        pid = os.environ.pop("WATCHDOG_PID", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        meant = not pid or pid == str(os.getpid())
        # Seconds within which systemd wants to hear of us; None if it does not.
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and meant else None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self, status: str) -> None:
        self._send(f"WATCHDOG=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # A service manager that does not listen is no reason to end a server that works.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.settimeout(1)
            client.sendto(message.encode(), self._address)
