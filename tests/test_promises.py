"""The list of promises at the end of a run says only what is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SUITE = """
import pytest

@pytest.mark.promise(1)
@pytest.mark.parametrize("n", range(3))
def test_all_pass(n): pass

@pytest.mark.promise(2)
@pytest.mark.parametrize("n", range(3))
def test_one_fails(n): assert n

@pytest.mark.promise(3)
def test_skipped(): pytest.skip("not here")

@pytest.mark.promise(6)
@pytest.mark.parametrize("n", range(2))
def test_one_is_slow(n): pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError

@pytest.mark.promise(4)
def test_teardown_fails(broken): pass

@pytest.mark.promise(4)
@pytest.mark.promise(5)
def test_two_promises(): pass

@pytest.mark.promise(7)
@pytest.mark.xfail
def test_expected_to_fail(): assert False
"""


def promises(folder: Path, *options: str, suite: str = SUITE) -> dict[int, tuple[str, str]]:
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = promise(n)\n")
    (folder / "test_suite.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    lines = re.findall(r"^  (\d)  (proved|FAILED|IN PART|NOT RUN) .*?\.  +(.*)$", output, re.M)
    return {int(number): (verdict, counts) for number, verdict, counts in lines}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_only_what_ran_and_passed_is_proved(tmp_path: Path, workers: tuple[str, ...]) -> None:
    assert promises(tmp_path, *workers) == {
        1: ("proved", "3 passed"),
        2: ("FAILED", "1 failed, 2 passed"),
        3: ("NOT RUN", "1 skipped"),
        4: ("FAILED", "1 failed, 1 passed"),
        5: ("proved", "1 passed"),
        6: ("proved", "2 passed"),
        7: ("NOT RUN", "1 skipped"),
    }


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_what_a_selection_left_out_is_said(tmp_path: Path, workers: tuple[str, ...]) -> None:
    found = promises(tmp_path, *workers, "-k", "all_pass or one_is_slow and 1")
    assert found[1] == ("proved", "3 passed")
    assert found[2] == ("NOT RUN", "3 not run")
    assert found[6] == ("IN PART", "1 passed, 1 not run")


def test_a_run_that_stops_early_proves_nothing_that_it_did_not_reach(tmp_path: Path) -> None:
    found = promises(tmp_path, "-x")
    assert found[6] == ("NOT RUN", "2 not run")


def test_a_promise_without_a_test_is_said(tmp_path: Path) -> None:
    suite = "import pytest\n@pytest.mark.promise(1)\ndef test_it(): pass\n"
    assert promises(tmp_path, suite=suite) == {
        1: ("proved", "1 passed"),
        **dict.fromkeys((2, 3, 4, 5, 6, 7), ("NOT RUN", "no test")),
    }
