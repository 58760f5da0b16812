"""What all tests of replication share."""

from collections.abc import Iterator

import pytest

from tests.replication.rig import MADE


@pytest.fixture(autouse=True)
def _clients_are_closed() -> Iterator[None]:
    """Clients that a test has left open are closed at its end."""
    yield
    for client in MADE:
        client.close()
    MADE.clear()
