"""Claims keep others out, in this process and in others, and end with their holder."""

import os
import signal
from pathlib import Path

import pytest

from kvpager.stores.claims import MENDING, Claims
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import other_process, store

KEYS = [bytes([number]) + bytes(31) for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db.lock"


def test_one_holds_a_key_until_it_gives_it_back(path: Path) -> None:
    one, two = Claims(path), Claims(path)
    assert one.take(KEYS[0])
    assert not one.take(KEYS[0])  # not twice
    assert not two.take(KEYS[0])
    assert two.take(KEYS[1])
    two.give_back(KEYS[0])  # not its own
    assert not two.take(KEYS[0])
    one.give_back(KEYS[0])
    assert two.take(KEYS[0])
    one.close()
    two.close()


def test_closing_one_ends_its_claims_alone(path: Path) -> None:
    one, two, three = Claims(path), Claims(path), Claims(path)
    assert one.take(KEYS[0])
    assert two.take(KEYS[1])
    two.close()
    assert not three.take(KEYS[0])
    assert three.take(KEYS[1])
    one.close()
    assert three.take(KEYS[0])
    three.close()


@pytest.mark.parametrize("key", [MENDING, bytes(32), b"\xff" * 32])
def test_any_key_can_be_claimed(path: Path, key: bytes) -> None:
    one, two = Claims(path), Claims(path)
    assert one.take(key)
    assert not two.take(key)
    one.close()
    two.close()


def test_a_mark_tells_that_a_store_was_made(path: Path) -> None:
    claims = Claims(path)
    assert not claims.marked
    claims.open()
    assert claims.marked
    assert path.stat().st_mode & 0o777 == 0o600
    claims.close()
    path.write_bytes(b"something else")
    assert not claims.marked


def test_claims_move_to_a_new_file_when_theirs_is_gone(path: Path) -> None:
    one, two = Claims(path), Claims(path)
    assert one.take(KEYS[0])
    path.unlink()
    assert two.take(KEYS[0])  # in the new file
    assert two.take(KEYS[1])
    one.take(KEYS[2])
    one.open()
    assert not one.take(KEYS[0])
    assert not two.take(KEYS[2])
    one.open()
    one.close()
    two.close()


HOLD = """
    import sys
    from pathlib import Path
    from tests.stores.fake import key_of
    from tests.stores.sqlite_rig import store
    tier = store(Path(sys.argv[1]))
    print(tier.claim(key_of(1)), flush=True)
    sys.stdin.read()
"""


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    other = other_process(HOLD, str(path))
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    tier = store(path)
    assert not tier.claim(key_of(1))
    assert tier.claim(key_of(2))
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert tier.claim(key_of(1))
    tier.release(key_of(1))
    tier.release(key_of(1))
    tier.close()


def test_stores_in_one_process_keep_each_other_out_while_they_open_and_close(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    one = store(path)
    assert one.claim(key_of(1))
    for _ in range(3):
        two = store(path)
        assert not two.claim(key_of(1))
        two.close()
    one.close()
    two = store(path)
    assert two.claim(key_of(1))
    two.close()
