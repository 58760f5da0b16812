"""URLs of a Redis: what they name, what is refused, and that nobody sees the password."""

from __future__ import annotations

import pytest

from kvpager.build import StoreOptions
from kvpager.errors import ConfigError
from kvpager.stores.redis_url import PASSWORD, USERNAME, RedisPlace, redis_place


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h", RedisPlace("single", False, (("h", 6379),))),
        ("redis://h:1/3", RedisPlace("single", False, (("h", 1),), 3)),
        ("rediss://h:1?ca=/x.pem", RedisPlace("single", True, (("h", 1),), ca="/x.pem")),
        ("redis://[::1]:7/0", RedisPlace("single", False, (("::1", 7),))),
        ("redis://u:p%40s@h", RedisPlace("single", False, (("h", 6379),), username="u", password="p@s")),
        ("redis://:p@h?prefix=x", RedisPlace("single", False, (("h", 6379),), prefix="x", password="p")),
        ("redis+sentinel://a:1,b:2/main/4", RedisPlace("sentinel", False, (("a", 1), ("b", 2)), 4, "main")),
        ("redis+sentinel://a/main", RedisPlace("sentinel", False, (("a", 26379),), service="main")),
        ("redis+cluster://a:1,b", RedisPlace("cluster", False, (("a", 1), ("b", 6379)))),
        ("rediss+cluster://a?cert=c&key=k", RedisPlace("cluster", True, (("a", 6379),), cert="c", key="k")),
    ],
)
def test_places(url: str, place: RedisPlace) -> None:
    assert redis_place(url, {}) == place


def test_user_and_password_come_from_the_environment() -> None:
    given = {USERNAME: "u", PASSWORD: "p"}
    assert (redis_place("redis://h", given).username, redis_place("redis://h", given).password) == ("u", "p")
    assert redis_place("redis://other:mine@h", given).password == "mine"


@pytest.mark.parametrize(
    "url",
    [
        "http://u:secret@h",
        "redis:/u:secret@h",
        "redis://u:1/secret@h",
        "redis://u:1?secret@h",
        "redis://u:1/2?secret@h",
        "redis://u:secret@",
        "redis://u:secret@h:0",
        "redis://u:secret@h:70000",
        "redis://u:secret@h:x",
        "redis://u:secret@a,b",
        "redis://u:secret@h/x",
        "redis://u:secret@h/1/2",
        "redis+sentinel://u:secret@h",
        "redis+cluster://u:secret@h/1",
        "redis://u:secret@h?color=red",
        "redis://u:secret@h?ca=x",
        "redis://u:secret@h?prefix=a:b",
    ],
)
def test_what_is_refused_does_not_show_the_password(url: str) -> None:
    for make in (lambda: redis_place(url, {}), lambda: StoreOptions.at([url]), lambda: StoreOptions(path=url)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert "secret" not in str(caught.value)


def test_places_are_shown_without_what_is_secret() -> None:
    url = "rediss+sentinel://name:secret@a:1,[::1]:2/main/3?ca=x"
    place = redis_place(url, {})
    assert str(place) == "rediss+sentinel://a:1,[::1]:2/main/3"
    options = StoreOptions.at([url, "store.db"])
    for shown in (repr(place), repr(options), str(options.told), options.places):
        assert "secret" not in shown
        assert "name:" not in shown
    assert options.path == "store.db"


def test_at_most_one_of_each() -> None:
    for places in ([], ["a", "b"], ["redis://a", "redis://b"]):
        with pytest.raises(ConfigError, match="one"):
            StoreOptions.at(places)
