"""What all tests share: reproducible random histories, and the list of promises at the end of a run.

A test marked ``@pytest.mark.promise(n)`` proves one of the promises of docs/architecture.md. A promise counts as
proved only if all tests marked with it were run and passed: one that failed, was skipped, was left out by a
selection or was never reached is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.redis_rig import RedisCluster, RedisSentinel, RedisServer

PROMISES = {
    1: "Pressure changes speed, never answers.",
    2: "Exact where it says exact.",
    3: "Books balance.",
    4: "A broken store is a miss, never a wrong answer.",
    5: "A key says everything that the bytes depend on.",
    6: "Bad input gets a clear error, before anything is changed.",
    7: "Memory is told whole.",
}


class PromiseReport:
    """Collects which tests stand for which promise and how they went, over all workers of a run."""

    def __init__(self) -> None:
        self.tests: dict[str, list[int]] = {}  # test id -> its promises
        self.outcomes: dict[str, str] = {}  # test id -> "passed", "failed" or "skipped"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before anything is deselected: what is left out is to be told too."""
        for item in items:
            numbers = sorted({mark.args[0] for mark in item.iter_markers("promise")})
            unknown = [number for number in numbers if number not in PROMISES]
            if unknown:
                raise pytest.UsageError(f"{item.nodeid}: there is no promise {unknown[0]}")
            if numbers:
                self.tests[item.nodeid] = numbers
        if hasattr(config, "workeroutput"):
            config.workeroutput["promises"] = self.tests

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker has collected (pytest-xdist)."""
        self.tests.update(getattr(node, "workeroutput", {}).get("promises", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed if its call and all around it did; an expected failure proves nothing."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped or hasattr(report, "wasxfail"):
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def line(self, number: int) -> tuple[str, dict[str, bool]]:
        """One promise's line, and how to colour it."""
        marked = [test for test, numbers in self.tests.items() if number in numbers]
        count = Counter(self.outcomes.get(test, "not run") for test in marked)
        parts = [f"{count[kind]} {kind}" for kind in ("failed", "passed", "skipped", "not run") if count[kind]]
        if count["failed"]:
            verdict, colour = "FAILED", {"red": True}
        elif not count["passed"]:
            verdict, colour = "NOT RUN", {"yellow": True}
        elif count["passed"] < len(marked):
            verdict, colour = "IN PART", {"yellow": True}
        else:
            verdict, colour = "proved", {"green": True}
        return f"  {number}  {verdict:8} {PROMISES[number]:58} {', '.join(parts) or 'no test'}", colour

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The list, when the run has anything to do with promises."""
        known = {number for numbers in self.tests.values() for number in numbers}
        if not known or config.option.collectonly:
            return
        whole = config.args_source is not pytest.Config.ArgsSource.ARGS
        terminalreporter.section("promises" if whole else "promises, as far as the chosen tests go")
        for number in PROMISES:
            text, colour = self.line(number)
            terminalreporter.write_line(text, **colour)


def pytest_configure(config: pytest.Config) -> None:
    """Hook the report in; let hypothesis try the same cases every time (``--hypothesis-profile=default``: new ones)."""
    hypothesis.settings.register_profile("same-every-time", derandomize=True, deadline=None, print_blob=True)
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("same-every-time")
    config.pluginmanager.register(PromiseReport(), "kvpager-promises")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own, empty."""
    from tests.redis_rig import RedisServer

    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster of three nodes of this test's own."""
    from tests.redis_rig import RedisCluster

    with RedisCluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinel]:
    """A primary and a replica of this test's own, watched by three sentinels."""
    from tests.redis_rig import RedisSentinel

    with RedisSentinel(tmp_path / "sentinel") as group:
        yield group
