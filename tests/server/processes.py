"""``kvpager serve`` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CODE = "import sys; from kvpager.cli.main import main; sys.exit(main())"


@contextmanager
def process(
    folder: str, tmp_path: Path, *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server on a free port, ready, and its address; killed at the end where it has not ended."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        running = subprocess.Popen(
            [sys.executable, "-c", CODE, "serve", folder, "--port", "0", *options],
            stdout=out,
            stderr=err,
            env=variables,
        )
    try:
        yield running, wait_ready(running, tmp_path / "err")
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()


def wait_ready(running: subprocess.Popen[bytes], err: Path) -> str:
    """Its address, once it says that it serves."""
    end = time.monotonic() + 120
    while "serving" not in err.read_text():
        assert running.poll() is None, err.read_text()
        assert time.monotonic() < end, err.read_text()
        time.sleep(0.05)
    found = re.search(r"http://[\d.:]+", err.read_text())
    assert found is not None
    return found.group()
