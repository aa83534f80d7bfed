from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def without_fsync() -> Iterator[None]:
    """For tests that write thousands of small files and do not ask whether they survive a crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
