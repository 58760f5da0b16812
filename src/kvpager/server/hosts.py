"""The names that a server goes by: a page of the web must not reach it by having its own name lead here.

A browser lets a page talk to the server that its name leads to. Who owns a name can have it lead to 127.0.0.1 once
the page is there (DNS rebinding), so a server without keys that listens on this machine alone looks at the Host header.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from kvpager.server.errors import ApiError

__all__ = ["is_loopback", "require_host"]


def require_host(header: str | None, names: tuple[str, ...] | None) -> None:
    """Raise ApiError (403) where the Host header is a name that is none of `names` (None: all are fine).

    Addresses and localhost are always fine: nobody else owns them. So is no header at all, which browsers always send.
    """
    if names is None or not header:
        return
    name = _name(header)
    if name != "localhost" and not name.endswith(".localhost") and not _is_address(name) and name not in names:
        raise ApiError(
            403,
            f"This server does not go by the name {name[:100]!r}; --allowed-hosts says which names it has.",
            code="host_not_allowed",
        )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _name(header: str) -> str:
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        name = header
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
