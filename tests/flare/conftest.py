from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flare.real import Hospitals, hospitals_in


@pytest.fixture(scope="session")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    """One running system for all tests that leave it as they found it: up, with nothing in the way."""
    with hospitals_in(tmp_path_factory.mktemp("real")) as made:
        yield made
