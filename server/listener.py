"""Takes the listening socket before anything slow happens, so that a taken port is told at once and without a race."""

from __future__ import annotations

import errno
import resource
import socket
import sys

from server.configuration import ConfigurationError

_BACKLOG = 2048


class PortTakenError(Exception):
    """Somebody else listens on this address and port (exit code 4)."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises PortTakenError or ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(f"server.host is {host!r}, which is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _explained(error, host, port) from error
    listener.setblocking(False)
    return listener


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may, and say how many: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _explained(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(f"port {port} on {host} is taken; stop who holds it, or choose another with --port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigurationError(f"server.port is {port}, which only root may listen on; choose one above 1023")
    return ConfigurationError(f"server.host is {host!r}, which cannot be listened on: {error.strerror}")


def url_of(listener: socket.socket) -> str:
    """The address in the form that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
