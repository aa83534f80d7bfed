from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before anything imports torch, which reads it once; child processes of a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]

settings.register_profile("crossward", deadline=None)
settings.register_profile("crossward-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("crossward-ci" if os.environ.get("CI") else "crossward")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data packs beside the repository; the test is skipped where they are not there."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the data packs are not beside the repository (../shared/data)")
    return folder
