"""Whom a request without a key may come from: a program, never a foreign page in a browser, nor for /admin a proxy.

A page that somebody opens elsewhere runs on this machine too, and its browser carries its requests to every port here.
A key keeps it out, for it does not know any. Without a key there is only what browsers say of their own accord.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from server.errors import ApiError

ANY_HOST = "*"

_UNREGISTRABLE = (".local", ".localhost", ".internal", ".home.arpa")
"""Ends of names that nobody can register: the public DNS never answers for them (RFC 6761, 6762, 8375; ICANN)."""

_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
"""`same-site` too: another port of this machine is another program."""

_PROXY_HEADERS = frozenset(
    {
        *("forwarded", "via", "client-ip", "true-client-ip", "cf-connecting-ip", "cf-ray", "fastly-client-ip"),
        *("x-real-ip", "x-client-ip", "x-cluster-client-ip", "x-remote-addr", "x-remote-ip", "x-proxyuser-ip"),
        *("x-original-host", "x-original-url", "x-original-uri", "x-rewrite-url", "x-scheme", "x-azure-clientip"),
    }
)
_PROXY_PREFIXES = ("x-forwarded", "x-original-forwarded", "x-envoy-", "x-appengine-", "x-amzn-", "x-arr-")

_PORT = re.compile(r":\d*$")


class Trust:
    """The names under which this daemon is asked, and the pages that may ask. Immutable.

    `hosts` are names beside those that need no telling, `*` is any; `origins` are pages as browsers name them,
    `https://app.example`, `*` is any.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(_bare(each) for each in (*hosts, socket.gethostname()))
        self._origins = frozenset(each.lower().rstrip("/") for each in origins)

    def check(self, scope: Scope, headers: Headers, *, has_named_pages: bool = True) -> None:
        """Raises ApiError (403) for a foreign name, a foreign page, or a browser that says it comes from one.

        `has_named_pages` is whether the pages of `origins` may ask: they may call the model, never operate the daemon.
        """
        hosts = [host for host in headers.getlist("host") if host]
        if not all(self._is_ours(host, scope) for host in hosts):
            raise _refused(
                "the Host header has a name that is not known to be this daemon's; ask by its address, give the daemon "
                "keys, or start it with --allowed-hosts NAME"
            )
        origins = headers.getlist("origin")
        is_named = ANY_HOST in self._origins or self._origins.issuperset(each.lower() for each in origins)
        if has_named_pages and origins and is_named:
            return
        if any(urlsplit(origin).netloc.lower() not in {host.lower() for host in hosts} for origin in origins):
            raise _refused("a page of another origin may not ask without a key; give the daemon keys")
        if not _FOREIGN_SITES.isdisjoint(headers.getlist("sec-fetch-site")):
            raise _refused("a page of another site may not ask without a key; open the daemon's own page, or give keys")

    def _is_ours(self, host: str, scope: Scope) -> bool:
        """A page can only have its own name looked up as this machine's address (DNS rebinding), never an address nor a
        name that it cannot register. From this machine, where there are more pages than programs, less is taken."""
        name, is_here = _bare(host), is_loopback(scope.get("server"))
        if name in self._hosts or ANY_HOST in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not is_here and ("." not in name or name.endswith(_UNREGISTRABLE))
        return not is_here or _unmapped(address).is_loopback or address.is_unspecified


def is_on_this_machine(scope: Scope, headers: Headers) -> bool:
    """Whether the client itself is here, and no proxy that speaks for somebody else.

    One in HTTP/1.0 is taken for a proxy's: it is what nginx's bare `proxy_pass` speaks, without any header.
    """
    is_forwarded = any(name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES) for name in headers)
    return is_loopback(scope.get("client")) and not is_forwarded and scope.get("http_version") != "1.0"


def is_loopback(end: tuple[str, int | None] | None) -> bool:
    """Whether one end of a connection is; that of a Unix socket is not, for what sits there is usually a proxy."""
    try:
        return _unmapped(ipaddress.ip_address(end[0] if end else "")).is_loopback
    except ValueError:
        return False


def _unmapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _bare(host: str) -> str:
    """A Host header's name or address, without port, brackets and the dot of a full name."""
    host = host.strip().lower()
    if not (host.count(":") > 1 and not host.startswith("[")):
        host = _PORT.sub("", host)
    return host.removeprefix("[").removesuffix("]").removesuffix(".")


def _refused(message: str) -> ApiError:
    return ApiError(403, message, code="foreign_page")
