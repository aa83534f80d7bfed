from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.workers import work


def act(item: str) -> str:
    """Does to its process what the item says."""
    if item == "crash":
        ctypes.string_at(0)
    if item == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "hang":
        time.sleep(600)
    if item == "refuse":
        raise Refused(Reason.NO_PIXELS, "3 frames")
    if item == "raise":
        raise ValueError("PLANTED^NAME")
    if item == "eat":
        bytearray(2**30)
    return item.upper()


def outcome(items: list[str], **options: float) -> dict[int, object]:
    found = dict(work(act, items, **options))
    assert len(found) == len(items)
    return found


def test_results_in_this_process() -> None:
    found = outcome(["a", "refuse", "raise"], processes=0)
    assert found[0] == "A"
    assert isinstance(found[1], Refused)
    assert (found[1].reason, found[1].detail) == (Reason.NO_PIXELS, "3 frames")
    assert isinstance(found[2], Refused)
    assert "PLANTED" not in str(found[2])


def test_every_kind_of_trouble_costs_its_own_item_only() -> None:
    troubles = {"crash": Reason.CRASHED, "kill": Reason.CRASHED, "hang": Reason.TIMED_OUT}
    troubles |= {"refuse": Reason.NO_PIXELS, "raise": Reason.NOT_DECODED, "eat": Reason.TOO_LARGE}
    items = [f"item {number}" for number in range(40)]
    for place, trouble in enumerate(troubles):
        items.insert(6 * place + 2, trouble)
    found = outcome(items, processes=2, seconds=1.5, memory=200 * 2**20)
    for number, item in enumerate(items):
        result = found[number]
        if item in troubles:
            assert isinstance(result, Refused), item
            assert result.reason is troubles[item], item
        else:
            assert result == item.upper()


@settings(max_examples=3)
@given(st.lists(st.sampled_from(["a", "b", "kill", "refuse"]), max_size=40), st.integers(1, 3))
def test_each_item_answered_once(items: list[str], processes: int) -> None:
    answers = list(work(act, items, processes=processes))
    assert Counter(number for number, _ in answers) == Counter(range(len(items)))
    refused = sum(isinstance(result, Refused) for _, result in answers)
    assert refused == sum(item in ("kill", "refuse") for item in items)


def test_stopping_early_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    results = work(act, [str(number) for number in range(100)], processes=2)
    next(results)
    results.close()
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    # The fork server and the resource tracker stay, for the next workers.
    assert len(after) <= 2


def die() -> None:
    os._exit(3)


def test_workers_that_never_start_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="end before they begin"):
        list(work(act, ["a", "b"], processes=1, prepare=die))


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom crossward.imaging.workers import work\n"
        "if __name__ == '__main__':\n"
        "    for number, result in work(str, range(64), processes=2):\n"
        "        print('ready', flush=True)\n        time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
