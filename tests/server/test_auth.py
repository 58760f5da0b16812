"""API keys: who is let in, what others see of them, and whose pages a request may share."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from kvpager.errors import ConfigError
from kvpager.server.auth import ApiKeys, collect_keys
from kvpager.server.errors import ApiError
from kvpager.server.logs import LOGGER, JsonLines
from tests.server.harness import LiveServer, error_of, fake_server, real_server

KEYS = ("first-key", "second-key")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_known_keys_are_let_in() -> None:
    with fake_server(api_keys=KEYS) as server:
        for key in KEYS:
            assert server.client.get("/v1/models", headers=bearer(key)).status_code == 200
        wrong = [
            {},
            bearer("first-ke"),
            bearer("first-keyy"),
            {"Authorization": "Bearer"},
            {"Authorization": "first-key"},
        ]
        for headers in [*wrong, {"Authorization": "Basic first-key"}]:
            for path in ("/v1/models", "/stats", "/openapi.json", "/nowhere"):
                answer = server.client.get(path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            refused = server.post("/v1/completions", {"prompt": "a"}, headers=headers)
            assert refused.status_code == 401
        for path in ("/health", "/ready", "/version"):
            assert server.client.get(path).status_code == 200


def test_each_key_has_a_salt_of_its_own_that_does_not_change() -> None:
    first, second = (ApiKeys(KEYS).caller(f"Bearer {key}") for key in KEYS)
    assert first.salt != second.salt
    assert len(first.salt) == 32
    assert ApiKeys(("first-key",)).caller("bearer first-key").salt == first.salt
    assert ApiKeys().caller(None).salt == b""
    assert KEYS[0].encode() not in repr(vars(ApiKeys(KEYS))).encode()
    with pytest.raises(ApiError):
        ApiKeys(KEYS).caller("Bearer \udcff")


def test_the_salt_reaches_the_engine() -> None:
    with fake_server(api_keys=KEYS) as server:
        for key in KEYS:
            server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer(key))
        assert list(server.engine.salts.values()) == [ApiKeys(KEYS).caller(f"Bearer {key}").salt for key in KEYS]


def test_callers_with_other_keys_never_hit_each_others_pages(folder: str) -> None:
    with real_server(folder, api_keys=KEYS) as server:

        def cached(key: str) -> int:
            body = {"prompt": "the same long beginning " * 8, "max_tokens": 2}
            usage = server.post("/v1/completions", body, headers=bearer(key)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached("first-key"), cached("second-key")] == [0, 0]
        assert cached("first-key") > 0
        assert cached("second-key") > 0


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \n#gamma\n")
    found = collect_keys(["delta"], str(file), {"KVPAGER_API_KEY": "epsilon"})
    assert found == ["delta", "epsilon", "alpha", "beta"]
    assert collect_keys([], None, {}) == []


@pytest.mark.parametrize(
    "content", [b"", b"# none\n", b"two words\n", "schl\u00fcssel\n".encode(), b"\xff\n", b"x" * 1025]
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key") as caught:
        collect_keys([], str(file), {})
    assert "two words" not in str(caught.value)


def test_a_key_that_is_empty_is_refused_rather_than_letting_all_in() -> None:
    with pytest.raises(ConfigError, match="KVPAGER_API_KEY"):
        collect_keys([], None, {"KVPAGER_API_KEY": ""})
    with pytest.raises(ConfigError, match="can't be read"):
        collect_keys([], "/does/not/exist", {})


def logged(server: LiveServer, headers: dict[str, str]) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        server.post("/v1/completions", {"prompt": "a private thing", "max_tokens": 3}, headers=headers)
        server.client.get("/nowhere", headers=headers)
        server.until(lambda: stream.getvalue().count("\n") == 2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue()


def test_logs_tell_of_requests_but_not_of_keys_and_prompts() -> None:
    with fake_server(api_keys=KEYS) as server:
        text = logged(server, {**bearer("second-key"), "X-Request-Id": "mine-1"})
    assert "second-key" not in text
    assert "private" not in text
    first, second = (json.loads(line) for line in text.splitlines())
    assert first["id"] == "mine-1"
    assert first["status"] == 200
    assert first["key"] == 2
    assert first["completion_tokens"] == 3
    assert first["path"] == "/v1/completions"
    assert second["status"] == 404


def test_prompts_are_logged_where_that_was_asked_for() -> None:
    with fake_server(log_prompts=True) as server:
        first = json.loads(logged(server, {}).splitlines()[0])
    assert first["prompts"] == ["a private thing"]
    assert first["answers"] == ["a p"]


def test_request_ids_are_taken_made_and_checked() -> None:
    with fake_server() as server:
        for sent in ("abc-1", "a" * 128):
            assert server.client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"] == sent
        for sent in ("a" * 129, "with space", 'quo"te', ""):
            made = server.client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"]
            assert made.startswith("req-")
            assert len(made) == 36
