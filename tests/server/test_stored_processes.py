"""``kvpager serve --store`` stopped and started again: what it goes on with, and what it must never find."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import process

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"


def options(tmp_path: Path, *more: str) -> list[str]:
    """Of a small server over a store."""
    return ["--store", str(tmp_path / "kv" / "store.db"), "--pool", "1MiB", "--swap", "memory", "--threads", "1", *more]


class Client:
    """Asks one server, and looks at its figures."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, prompt: str, session: str, **more: Any) -> tuple[str, int]:
        """The text of an answer, and how many of its prompt's tokens were there."""
        body = {"prompt": prompt, "session": session, "temperature": 0, "max_tokens": 20, "ignore_eos": True, **more}
        answer = self._http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        return made["choices"][0]["text"], made["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stats(self) -> dict[str, Any]:
        return dict(self._http.get("/stats").json())


@pytest.mark.slow
@pytest.mark.promise(5)
def test_sessions_on_int8_pages_go_on_under_another_seed_of_hashes(folder: str, tmp_path: Path) -> None:
    paging = options(tmp_path, "--kv-dtype", "int8", "--budget", "64")
    with process(folder, tmp_path, *paging, PYTHONHASHSEED="1") as (running, url), Client(url) as client:
        said = client.ask(TEXT, "a")[0]
        assert client.ask(TEXT, "b")[0] == said
        more = TEXT + said + " And?"
        whole = client.ask(more, "b")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    with process(folder, tmp_path, *paging, PYTHONHASHSEED="2") as (running, url), Client(url) as client:
        assert client.ask(more, "a") == whole
        assert whole[1] >= 64
        figures = client.stats()
        assert figures["sessions"] == {"held": 0, "resumed": 1, "saved": 1, "lost": 0}
        assert figures["pager"]["store_tokens_hit"] > 0
        running.kill()  # what was told as stored is there after that, too
    with process(folder, tmp_path, *paging, PYTHONHASHSEED="3") as (_, url), Client(url) as client:
        assert client.ask(more, "c")[1] >= 64


def changed_weight(model: Path) -> list[str]:
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-3] ^= 64
    (model / "model.safetensors").write_bytes(weights)
    return []


def changed_rope(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 20000.0}
    (model / "config.json").write_text(json.dumps(config))
    return []


CHANGES = {
    "weight": changed_weight,
    "rope": changed_rope,
    "kv_dtype": lambda _: ["--kv-dtype", "int8"],
    "page_size": lambda _: ["--page-size", "8"],
    "kernel": lambda _: ["--kernel", "reference"],
}


@pytest.mark.slow
@pytest.mark.promise(5)
def test_after_any_change_of_what_pages_depend_on_nothing_is_found(folder: str, tmp_path: Path) -> None:
    """One model at one path under one name: whatever changes of it or of its pages, all is computed anew."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    with process(str(model), tmp_path, *options(tmp_path)) as (running, url), Client(url) as client:
        first, cached = client.ask(TEXT, "talk")
        assert cached == 0
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    for what, change in CHANGES.items():
        shutil.rmtree(model)
        shutil.copytree(folder, model)
        with process(str(model), tmp_path, *options(tmp_path, *change(model))) as (_, url), Client(url) as client:
            answer, cached = client.ask(TEXT, "talk")
            figures = client.stats()
            assert cached == figures["pager"]["store_tokens_hit"] == figures["store"]["hits"] == 0, what
            assert (figures["sessions"]["resumed"], figures["sessions"]["lost"]) == (0, 1), what
            assert figures["store"]["damaged"] == 0, what
            if what in ("page_size", "kernel"):  # other pages, the same numbers
                assert answer == first, what
