"""Where a Redis is: its URL taken apart, and said again without what is secret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote

from kvpager.errors import ConfigError

__all__ = ["PASSWORD", "SCHEMES", "USERNAME", "RedisPlace", "is_redis_url", "redis_place", "require_path"]

USERNAME, PASSWORD = "KVPAGER_REDIS_USERNAME", "KVPAGER_REDIS_PASSWORD"
"""Environment variables that are read where the URL names no user or no password."""

Kind = Literal["single", "sentinel", "cluster"]
SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Kind, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_OPTIONS = {"ca": "ca", "ssl_ca_certs": "ca", "cert": "cert", "key": "key", "prefix": "prefix"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class RedisPlace:
    """A Redis, or several that are one.

    kind      "single", "sentinel" (`service` says which primary) or "cluster"
    tls       whether connections are encrypted and the server's certificate is checked
    nodes     host and port of each that was named
    db        the number of the database; 0 for a cluster
    prefix    what all our keys begin with
    ca, cert, key  files: who is trusted, and what this side shows; "" for the system's, and for nothing
    username, password  never shown: not in `repr`, not in `str`
    """

    kind: Kind
    tls: bool
    nodes: tuple[tuple[str, int], ...]
    db: int = 0
    service: str = ""
    prefix: str = "kvpager"
    ca: str = ""
    cert: str = ""
    key: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        scheme = next(name for name, given in SCHEMES.items() if given == (self.kind, self.tls))
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        service = f"/{self.service}" if self.service else ""
        return f"{scheme}://{nodes}{service}" + (f"/{self.db}" if self.db else "")


def is_redis_url(text: str) -> bool:
    """Whether a text begins as the URL of a Redis does."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def require_path(text: str) -> None:
    """Raise ConfigError for what is meant as a URL, of whatever kind; it is not shown, since it may hold a password."""
    if _URL.match(text):
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"store: it is neither the path of a file nor the URL of a Redis ({known})")


def redis_place(url: str, environment: Mapping[str, str] = os.environ) -> RedisPlace:
    """A URL taken apart: SCHEME://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...][/SERVICE][/DB][?OPTION=VALUE&...].

    Raises ConfigError, which says what is wrong and never shows the password.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in SCHEMES:
        raise ConfigError(f"store: URLs begin with {', '.join(f'{name}://' for name in SCHEMES)}")
    kind, tls = SCHEMES[scheme.lower()]
    rest, _, query = rest.partition("?")
    authority, *path = rest.split("/")
    if "@" in query or any("@" in part for part in path):
        raise ConfigError("store: in user and password / is written as %2F, ? as %3F")
    login, at, addresses = authority.rpartition("@")
    username, colon, password = login.partition(":")
    service, db = _path(kind, [unquote(part) for part in path if part])
    nodes = tuple(_node(address, _PORTS[kind]) for address in addresses.split(","))
    if kind == "single" and len(nodes) > 1:
        raise ConfigError("store: redis:// names one server; redis+sentinel:// and redis+cluster:// take several")
    return RedisPlace(
        kind,
        tls,
        nodes,
        db,
        service,
        username=(unquote(username) if at and username else None) or environment.get(USERNAME) or None,
        password=unquote(password) if colon else environment.get(PASSWORD) or None,
        **_options(query, tls),
    )


def _path(kind: Kind, parts: list[str]) -> tuple[str, int]:
    """Service and number of the database."""
    service = ""
    if kind == "sentinel":
        if not parts:
            raise ConfigError("store: redis+sentinel:// needs the primary's name: redis+sentinel://HOST:PORT/NAME")
        service = parts.pop(0)
    number = parts.pop(0) if parts else "0"
    if parts or not number.isascii() or not number.isdigit() or (kind == "cluster" and int(number)):
        allowed = "a cluster has database 0 only" if kind == "cluster" else "a number of a database is allowed there"
        raise ConfigError(f"store: what stands behind the URL's address is wrong; {allowed}")
    return service, int(number)


def _node(address: str, default: int) -> tuple[str, int]:
    host, port = address, ""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.removeprefix(":")
    elif ":" in address:
        host, _, port = address.rpartition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16)):
        raise ConfigError("store: the URL names no host, or a port that is not 1 to 65535")
    return host, int(port) if port else default


def _options(query: str, tls: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name not in _OPTIONS:
            raise ConfigError(f"store: the URL's option {name!r} is not one of {', '.join(_OPTIONS)}")
        found[_OPTIONS[name]] = values[-1]
    if not tls and found.keys() & {"ca", "cert", "key"}:
        raise ConfigError("store: ca, cert and key belong to TLS; the URL then begins with rediss")
    if not _PREFIX.fullmatch(found.get("prefix", "kvpager")):
        raise ConfigError("store: prefix is 1 to 64 letters, digits, dots, dashes and underscores")
    return found
