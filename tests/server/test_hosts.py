"""The names that a server goes by."""

from __future__ import annotations

import argparse

import pytest

from kvpager.cli import serve
from kvpager.server.hosts import is_loopback
from kvpager.server.service import ServiceOptions
from tests.server.harness import error_of, fake_server

GOOD = [
    "127.0.0.1:8000",
    "localhost",
    "LOCALHOST:80",
    "a.localhost",
    "[::1]:8000",
    "10.0.0.7",
    "mine.example:8000",
    "Mine.Example.",
]
BAD = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notlocalhost",
    "[x",
    "mine.example.evil",
]


def options(*more: str) -> ServiceOptions:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.service_options(parser.parse_args(["serve", *more]))


def test_a_name_that_is_not_the_servers_is_refused() -> None:
    with fake_server(hosts=("mine.example",)) as server:
        for host in GOOD:
            assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in BAD:
            refused = server.client.get("/v1/models", headers={"Host": host})
            assert refused.status_code == 403, host
            assert error_of(refused)["code"] == "host_not_allowed"
            assert server.post("/v1/completions", {"prompt": "a"}, headers={"Host": host}).status_code == 403
            assert server.client.get("/health", headers={"Host": host}).status_code == 200
    with fake_server() as server:
        assert server.client.get("/v1/models", headers={"Host": "any.example"}).status_code == 200


def test_names_are_looked_at_where_web_pages_could_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPAGER_API_KEY", raising=False)
    assert options().hosts == ()
    assert options("--host", "::1").hosts == ()
    assert options("--host", "0.0.0.0").hosts is None
    assert options("--api-key", "k").hosts is None
    assert options("--allowed-hosts", "A.example.", "b").hosts == ("a.example", "b")
    assert options("--allowed-hosts", "*").hosts is None


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("a.example", False),
    ],
)
def test_addresses_of_this_machine_alone(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone
