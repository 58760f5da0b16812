"""API keys: who may ask, and whose pages a request may share."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpager.errors import ConfigError
from kvpager.server.errors import ApiError

__all__ = ["ApiKeys", "Caller", "collect_keys"]

ENVIRONMENT = "KVPAGER_API_KEY"
MOST_CHARACTERS = 1024
_SALT_LABEL = b"kvpager tenant salt 1"  # the number changes if pages kept under a salt must not be found any more


@dataclass(frozen=True)
class Caller:
    """Who asks. `salt` goes into the keys of its pages, so that callers with other keys never find them.

    key   the number of its API key, in the order given, for logs; None on a server without keys
    """

    salt: bytes
    key: int | None = None


class ApiKeys:
    """The keys that a server takes; none of them means that everybody may ask, as one tenant.

    Only hashes of keys are kept.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        distinct = list(dict.fromkeys(key.encode() for key in keys))
        self._digests = [hashlib.sha256(key).digest() for key in distinct]
        self._salts = [hmac.digest(key, _SALT_LABEL, "sha256") for key in distinct]

    def __len__(self) -> int:
        return len(self._digests)

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this Authorization header; raises ApiError (401) for anybody unknown.

        Takes the same time whichever key it is, and however much of a wrong one is right.
        """
        if not self._digests:
            return Caller(b"")
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _refused("No API key was sent; send it as 'Authorization: Bearer KEY'.")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = number
        if found is None:
            raise _refused("The API key is not one of this server's.")
        return Caller(self._salts[found], found + 1)


def collect_keys(given: Iterable[str], file: str | None, environment: Mapping[str, str]) -> list[str]:
    """Keys from options, from KVPAGER_API_KEY and from a file (one a line; blank lines and lines with # are left out).

    Raises ConfigError that names the source, never the key.
    """
    keys = [(f"--api-key {number}", key) for number, key in enumerate(given, 1)]
    if ENVIRONMENT in environment:
        keys.append((ENVIRONMENT, environment[ENVIRONMENT]))
    if file is not None:
        in_file = [(f"{file}, line {number}", line.strip()) for number, line in enumerate(_lines(file), 1)]
        in_file = [(source, key) for source, key in in_file if key and not key.startswith("#")]
        if not in_file:
            raise ConfigError(f"api_key_file: {file} holds no key")
        keys += in_file
    for source, key in keys:
        if not key or len(key) > MOST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"api_key: {source} is not 1 to {MOST_CHARACTERS} printable ASCII characters without a space"
            )
    return [key for _, key in keys]


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file: {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file: {file} is not UTF-8 text") from None


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
