"""Processes that the tests of sharded tables share."""

from collections.abc import Iterator

import pytest

from tests.support.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Four processes, started once."""
    started = Processes(4)
    yield started
    started.close()
