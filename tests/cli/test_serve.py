"""``kvpager serve``: what it refuses before it loads anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvpager.build import PagerOptions
from kvpager.cli.main import build_parser, main
from kvpager.cli.serve import Maker, service_options
from kvpager.cli.store_options import store_options
from kvpager.engine.engine import EngineConfig
from kvpager.server.service import Service
from tests.redis_rig import RedisServer


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--api-key-file", "/does/not/exist"], 2, "api_key_file: /does/not/exist can't be read"),
        (["--ssl-keyfile", "key"], 2, "TLS needs both"),
        (["--pool", "64MiB", "--memory", "64MiB"], 2, "not both"),
        (["one", "--model", "two"], 2, "not both"),
        (["--max-num-batched-tokens", "0"], 2, "not in 1"),
        (["--port", "65536"], 2, "not in 0..65535"),
        (["--host", "no-such-host.invalid", "--port", "0"], 1, "can't listen on no-such-host"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    assert code_of(["serve", *options]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def code_of(arguments: list[str]) -> object:
    """The exit code, whether it is returned or argparse's own."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_a_port_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 1
    assert "nothing at" in capsys.readouterr().err


def test_a_missing_extra_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else there(name, *rest)
    )
    assert main(["serve"]) == 1
    assert "pip install 'kvpager[serve]'" in capsys.readouterr().err


def test_names_limits_and_keys_come_from_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_API_KEY", "from-environment")
    (tmp_path / "keys").write_text("from-file\n")
    parser = build_parser()
    args = parser.parse_args(
        ["serve", "--api-key", "a", "--api-key", "b", "--api-key-file", str(tmp_path / "keys"), "--max-body", "1MiB"]
    )
    options = service_options(args)
    assert options.api_keys == ("a", "b", "from-environment", "from-file")
    assert options.names == ("smollm2-135m",)
    assert options.limits.body_bytes == 2**20
    (tmp_path / "model").mkdir()
    folder = service_options(parser.parse_args(["serve", "--model", str(tmp_path / "model")]))
    assert folder.names == ("model",)  # clients need not know where it lies
    named = service_options(parser.parse_args(["serve", "--served-model-name", "x", "y"]))
    assert named.names == ("x", "y")


def started(model: str, *places: Path | str) -> str:
    """What is told when the server is ready, on a store."""
    more = [word for place in places for word in ("--store", str(place))]
    args = build_parser().parse_args(["serve", model, "--threads", "1", *more])
    args.model = args.served
    paging = PagerOptions(pool="512", swap="memory")
    maker = Maker(args, paging, EngineConfig(max_num_seqs=2), store_options(args, paging))
    served = maker()
    try:
        return maker.told("http://here", Service(maker, service_options(args)))
    finally:
        served.engine.close()


def test_the_store_is_told_with_the_memory(model: str, tmp_path: Path) -> None:
    told = started(model, tmp_path / "store.db")
    assert f"store: {tmp_path / 'store.db'} holds 0 blocks and 0 sessions" in told
    assert "at most 10240 MiB on disk" in told
    assert told.startswith("memory: weights")


@pytest.mark.promise(4)
def test_a_store_that_is_another_applications_is_told_and_served_without(model: str, tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear diary, this is no store.")
    assert f"store: {path} is out of use (off); requests are served without it" in started(model, path)
    assert path.read_text() == "Dear diary, this is no store."


@pytest.mark.promise(4)
def test_both_stores_are_told_and_no_password(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.db"
    told = started(model, "redis://:s3cret@127.0.0.1:1", path)
    assert f"store: {path} holds 0 blocks" in told
    assert "store: redis://127.0.0.1:1 is out of use (io); requests are served without it" in told
    assert "s3cret" not in told + "".join(capfd.readouterr())


def test_a_redis_alone_is_told(model: str, redis_server: RedisServer) -> None:
    assert "holds 0 blocks and 0 sessions, 0 of at most 10240 MiB in Redis" in started(model, redis_server.url)
