"""Are there enough file descriptors? Asked before zmq, which ends the process when it runs out of them."""

from __future__ import annotations

import os


def require_descriptors(count: int, what: str) -> None:
    """Check that this process can open `count` more files.

    Raises:
        OSError: it cannot; the message says for what they are and what to do.
    """
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: {what} needs {count} file descriptors and {len(opened)} are left. "
            "Raise the limit (ulimit -n, LimitNOFILE= in a systemd unit).",
        ) from error
    finally:
        for fd in opened:
            os.close(fd)
