from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
import made_up_sites
from made_up_sites import made_up_cohort, made_up_study, simulate

made_up_sites.SIZE = 32
study = made_up_study(rounds=1, epochs=3)
study = replace(study, task=replace(study.task, width=float(sys.argv[2])))
simulate(made_up_cohort(), study, Path(sys.argv[1]) / "run", jobs=1)
"""


@pytest.mark.parametrize("width", [0.0625])
def test_a_narrow_model_trains_without_breaking_the_process(tmp_path: Path, run_script: Any, width: float) -> None:
    """Few channels, channels last, into a strided 1x1 convolution: the backward pass writes out of bounds.

    A known fault of the CPU library beneath PyTorch (oneDNN issue 6035); in a process of its own, since it may end
    in a crash, in a hang, or in wrong gradients.
    """
    done = run_script(TRAIN, tmp_path, width)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-300:]}"
