from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from opacus.accountants import PRVAccountant

from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.privacy.dp import accounting
from crossward.privacy.dp.accounting import Budget, Spending, epsilon
from crossward.privacy.dp.ledger import FILE, BudgetSpent, Ledger, OtherUnit, anchor_of, key_of
from crossward.privacy.dp.lines import Entry, Shared, read_lines
from crossward.privacy.dp.signing import certificate_signer, local_signer, verifier
from crossward.privacy.secagg.identity import Identity
from crossward.privacy.secagg.throwaway import Authority
from tests.privacy.ledgers import BUDGET, NAME, NOISE, entry, filled, ledger_in, signer_of

DELTA = BUDGET.delta


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "chest"


def cost(*noises: float) -> float:
    return epsilon([Spending(noise, 1.0, 1) for noise in noises], delta=DELTA)


def test_what_was_reserved_is_read_back(folder: Path) -> None:
    ledger = ledger_in(folder)
    assert ledger.entries() == ()
    assert not folder.exists(), "reading makes nothing"
    first = [entry(1), entry(1, what="validation", part="val", noise=12.5)]
    ledger.reserve(first, budget=BUDGET)
    ledger.reserve(
        [Entry(run="zweiter Lauf", round=1, what="steps", unit="patient", spending=Spending(1.1, 0.032, 31))],
        budget=BUDGET,
    )
    found = ledger_in(folder).entries()
    assert [each.number for each in found] == [1, 2, 3]
    assert [each.spending for each in found] == [*(each.spending for each in first), Spending(1.1, 0.032, 31)]
    assert [(each.run, each.round, each.what) for each in found][2] == ("zweiter Lauf", 1, "steps")
    assert found[0].previous == found[1].previous != found[2].previous
    assert all(each.time.endswith("+00:00") for each in found)


def test_every_line_names_its_signer_and_its_budget(folder: Path) -> None:
    filled(folder, 3)
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert {line["signer"] for line in lines} == {signer_of(folder).label}
    assert all(line["budget"] == {"epsilon": 8.0, "delta": 1e-5} for line in lines)


def test_files_and_folders_are_the_owners_alone(folder: Path) -> None:
    filled(folder, 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert anchor_of(folder).parent.stat().st_mode & 0o777 == 0o700
    assert anchor_of(folder).parent != folder
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(PrivacyRefusal, match="another folder"):
        ledger_in(folder, anchor=folder)


# What is spent


def test_everything_on_the_data_adds_up_over_runs(folder: Path) -> None:
    ledger = ledger_in(folder)
    ledger.reserve([entry(1)], budget=BUDGET)
    ledger.reserve([entry(1, run="second")], budget=BUDGET)
    assert ledger.spent(delta=DELTA) == cost(NOISE, NOISE)
    assert ledger.spent(delta=DELTA, run="second") == cost(NOISE)
    assert ledger.spent(delta=DELTA, run="third") == 0.0


def test_parts_count_side_by_side_only_where_patients_are_divided_alike(folder: Path) -> None:
    """Another seed divides the patients otherwise: who was in training may then be in validation."""
    one, other = folder.parent / "one", folder.parent / "other"
    for place, splits in ((one, ("s", "s")), (other, ("s", "t")), (folder, ("", ""))):
        ledger = ledger_in(place)
        for run, split in zip(("first", "second"), splits, strict=True):
            ledger.reserve([entry(1, run=run, split=split), entry(1, run=run, split=split, part="val")], budget=BUDGET)
    assert ledger_in(one).spent(delta=DELTA) == cost(NOISE, NOISE)
    assert ledger_in(other).spent(delta=DELTA) == cost(NOISE, NOISE, NOISE, NOISE)
    # Nothing said of the split: it is known of one run only.
    assert ledger_in(folder).spent(delta=DELTA) == cost(NOISE, NOISE, NOISE, NOISE)
    assert ledger_in(folder).spent(delta=DELTA, run="first") == cost(NOISE)


def test_a_budget_is_kept_to_and_what_would_pass_it_leaves_no_trace(folder: Path) -> None:
    budget = Budget(cost(NOISE, NOISE, NOISE) + 1e-6, DELTA)
    ledger = ledger_in(folder)
    for number in (1, 2):
        ledger.reserve([entry(number)], budget=budget)
    before = (folder / FILE).read_bytes(), anchor_of(folder).read_bytes()
    with pytest.raises(BudgetSpent) as caught:
        ledger.reserve([entry(3), entry(3, what="prototypes")], budget=budget)
    error = caught.value
    assert error.site == "alder/chest"
    assert error.spent == cost(NOISE, NOISE)
    assert error.asked == cost(NOISE, NOISE, NOISE, NOISE)
    assert error.left == pytest.approx(budget.epsilon - error.spent)
    assert isinstance(error, PrivacyRefusal)
    for said in (
        "alder/chest, round 3 of first",
        f"{error.spent:.2f} is spent",
        f"{error.asked:.2f}",
        "privacy officer",
    ):
        assert said in str(error)
    assert ((folder / FILE).read_bytes(), anchor_of(folder).read_bytes()) == before
    # The one that fits still does.
    ledger.reserve([entry(3)], budget=budget)
    with pytest.raises(BudgetSpent):
        ledger.reserve([entry(4)], budget=budget)


@pytest.mark.parametrize(("first", "second"), [("patient", "site"), ("site", "patient"), ("patient", "image")])
def test_units_are_never_added_up(folder: Path, first: str, second: str) -> None:
    ledger = ledger_in(folder)
    ledger.reserve([entry(1, unit=first)], budget=BUDGET)
    with pytest.raises(OtherUnit, match=f"hides a {first}, and this hides a {second}"):
        ledger.reserve([entry(2, unit=second)], budget=Budget(1e6, DELTA))
    with pytest.raises(OtherUnit):
        ledger.reserve([entry(2, unit=first), entry(2, unit=second)], budget=BUDGET)
    ledger.reserve([entry(2, unit=first)], budget=BUDGET)
    assert [each.unit for each in ledger.entries()] == [first, first]


def test_what_nobody_could_work_out_later_is_not_written_down(folder: Path) -> None:
    # A quick bound gives epsilon 5 for it, which is within the budget.
    asked = Entry(run="a", round=1, what="steps", unit="patient", spending=Spending(300.0, 0.01, 10**9))
    with pytest.raises(PrivacyRefusal, match="too much to work out"):
        ledger_in(folder).reserve([asked], budget=BUDGET)
    assert ledger_in(folder).entries() == ()


def test_a_step_without_noise_passes_no_budget(folder: Path) -> None:
    with pytest.raises(BudgetSpent, match="would be inf"):
        ledger_in(folder).reserve([entry(1, noise=0.0)], budget=Budget(1e12, DELTA))
    assert ledger_in(folder).entries() == ()


@pytest.mark.parametrize("answer", [float("nan"), RuntimeError("no")], ids=repr)
def test_without_a_figure_nothing_is_reserved(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    ledger = filled(folder, 1)

    def fail(*ignored: Any, **more: Any) -> float:
        if isinstance(answer, Exception):
            raise answer
        return float(answer)

    asked = Entry(run="a", round=2, what="steps", unit="patient", spending=Spending(1.3, 0.0321, 9))
    # What it costs by the tight bound: the quick one, which does not fail, is above that.
    together = [each.spending for each in (*ledger.entries(), asked)]
    budget = Budget(epsilon(together, delta=DELTA), DELTA)
    accounting._cost.cache_clear()
    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    with pytest.raises(PrivacyRefusal, match="could not be worked out"):
        ledger.reserve([asked], budget=budget)
    monkeypatch.undo()
    assert len(ledger.entries()) == 2


def test_nothing_to_reserve_and_entries_that_are_none_are_refused(folder: Path) -> None:
    ledger = ledger_in(folder)
    with pytest.raises(PrivacyRefusal, match="nothing was given"):
        ledger.reserve([], budget=BUDGET)
    with pytest.raises(PrivacyRefusal, match="names its run"):
        entry(1.5)  # type: ignore[arg-type]
    with pytest.raises(PrivacyRefusal, match="names its run"):
        entry(1, run=None)  # type: ignore[arg-type]


def test_a_run_that_was_restarted_has_spent_what_it_would_have_without(folder: Path) -> None:
    whole = filled(folder.parent / "whole", 6)
    for _ in range(3):
        ledger = ledger_in(folder)
        done = len(ledger.lines())
        for number in (done + 1, done + 2):
            ledger.reserve([entry(number), entry(number, what="prototypes", noise=20.0)], budget=BUDGET)
    assert ledger_in(folder).spent(delta=DELTA) == whole.spent(delta=DELTA)


# Changed by somebody


def _lines(folder: Path) -> list[bytes]:
    return (folder / FILE).read_bytes().splitlines(keepends=True)


def _put(folder: Path, lines: list[bytes]) -> None:
    (folder / FILE).write_bytes(b"".join(lines))


def cut_line(folder: Path) -> None:
    _put(folder, _lines(folder)[:-1])


def cut_first_line(folder: Path) -> None:
    _put(folder, _lines(folder)[1:])


def cut_byte(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1])


def edit_number(folder: Path) -> None:
    lines = _lines(folder)
    assert b'"noise":10.0' in lines[1]
    _put(folder, [lines[0], lines[1].replace(b'"noise":10.0', b'"noise":99.0'), *lines[2:]])


def edit_last_number(folder: Path) -> None:
    lines = _lines(folder)
    _put(folder, [*lines[:-1], lines[-1].replace(b'"steps":1', b'"steps":0')])


def swap_lines(folder: Path) -> None:
    lines = _lines(folder)
    _put(folder, [lines[0], lines[2], lines[1], *lines[3:]])


def say_twice(folder: Path) -> None:
    lines = _lines(folder)
    _put(folder, [*lines, lines[-1]])


def add_blank(folder: Path) -> None:
    lines = _lines(folder)
    _put(folder, [lines[0].replace(b",", b", ", 1), *lines[1:]])


def empty(folder: Path) -> None:
    (folder / FILE).write_bytes(b"")


def delete(folder: Path) -> None:
    (folder / FILE).unlink()


def delete_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def delete_anchor(folder: Path) -> None:
    anchor_of(folder).unlink()


def empty_anchor(folder: Path) -> None:
    anchor_of(folder).write_bytes(b"")


def edit_anchor(folder: Path) -> None:
    path = anchor_of(folder)
    assert b'"count":4' in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b'"count":4', b'"count":3'))


def replace_key(folder: Path) -> None:
    key_of(folder).unlink()
    local_signer(key_of(folder), ledger=folder.parent / "none")


def write_anew_with_another_key(folder: Path) -> None:
    """Whoever has no key makes a shorter ledger that is whole in itself."""
    forged = folder.parent / "forged" / "chest"
    filled(forged, 4)
    _put(folder, _lines(forged))


def older_ledger(folder: Path) -> None:
    """As it was put into a backup two rounds ago."""
    _put(folder, _lines(folder)[:2])


def older_anchor(folder: Path) -> None:
    anchor_of(folder).write_bytes((folder.parent / "anchor-of-2").read_bytes())


def other_ledger(folder: Path) -> None:
    """Of another data set, signed with the same key."""
    other = folder.parent / "other"
    ledger = ledger_in(other, signer=signer_of(folder), name="alder/knee")
    for number in range(4):
        ledger.reserve([entry(number)], budget=BUDGET)
    _put(folder, _lines(other))
    shutil.copy(anchor_of(other), anchor_of(folder))


def other_history(folder: Path) -> None:
    """As long, and signed with the same key: of a copy of the site that went on by itself."""
    copy = folder.parent / "copy"
    ledger = ledger_in(copy, signer=signer_of(folder))
    for number in range(4):
        ledger.reserve([entry(number, noise=1e4)], budget=BUDGET)
    _put(folder, _lines(copy))


TAMPERING = {
    cut_line: "was cut, or is an older copy: it has 3 whole lines, and had 4",
    cut_first_line: "line 1 does not follow",
    cut_byte: "was cut, or is an older copy: it has 3 whole lines, and had 4",
    edit_number: "line 2 was changed",
    edit_last_number: "line 4 was changed",
    swap_lines: "line 2 does not follow on the one before it",
    say_twice: "line 5 does not follow",
    add_blank: "line 1 was changed",
    empty: "has 0 whole lines, and had 4",
    delete: "is missing, but had 4 lines",
    delete_folder: "is missing, but had 4 lines",
    delete_anchor: "has no anchor any more",
    empty_anchor: "its anchor .* was changed",
    edit_anchor: "its anchor .* was changed",
    replace_key: "not signed with this site's key",
    write_anew_with_another_key: "line 1 is not signed with this site's key",
    older_ledger: "is an older copy: it has 2 whole lines, and had 4",
    older_anchor: "the anchor is an older one",
    other_ledger: "is of another ledger",
    other_history: "is not the one that its anchor was written for",
}


@pytest.fixture
def whole(folder: Path) -> Path:
    """A ledger of four lines, and what its anchor was after two."""
    filled(folder, 2)
    shutil.copy(anchor_of(folder), folder.parent / "anchor-of-2")
    ledger = ledger_in(folder)
    for number in (3, 4):
        ledger.reserve([entry(number), entry(number, what="prototypes", noise=20.0)], budget=BUDGET)
    return folder


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_what_was_changed_is_refused_in_plain_words_and_stays_as_it_is(
    whole: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(whole)
    files = [whole / FILE, anchor_of(whole)]
    before = [path.read_bytes() if path.exists() else None for path in files]
    signer = signer_of(whole)
    for attempt in (
        lambda ledger: ledger.entries(),
        lambda ledger: ledger.spent(delta=DELTA),
        lambda ledger: ledger.reserve([entry(5)], budget=BUDGET),
    ):
        with pytest.raises(PrivacyRefusal, match=TAMPERING[tamper]) as caught:
            attempt(ledger_in(whole, signer=signer))
        assert str(caught.value).startswith("the privacy ledger of alder/chest")
        assert "backup" in str(caught.value)
    assert [path.read_bytes() if path.exists() else None for path in files] == before


def test_no_byte_can_be_changed(folder: Path) -> None:
    ledger = filled(folder, 2)
    for path in (folder / FILE, anchor_of(folder)):
        good = path.read_bytes()
        for place in range(len(good)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            if path != folder / FILE and place == len(good) - 1:
                continue  # the end of the anchor's line says nothing
            with pytest.raises(PrivacyRefusal):
                ledger.entries()
        path.write_bytes(good)
    assert len(ledger.entries()) == 4


def test_a_ledger_by_another_name_is_refused(whole: Path) -> None:
    with pytest.raises(PrivacyRefusal, match="is of another ledger"):
        ledger_in(whole, name="alder/knee").entries()


# Crashes


def test_a_line_that_a_crash_cut_off_was_not_spent_wherever_it_was_cut(folder: Path) -> None:
    filled(folder, 2)
    anchor = anchor_of(folder).read_bytes()
    filled_up = ledger_in(folder)
    filled_up.reserve([entry(3), entry(3, what="prototypes", noise=20.0)], budget=BUDGET)
    content = (folder / FILE).read_bytes()
    kept = b"".join(_lines(folder)[:2])
    for end in range(len(kept), len(content)):
        (folder / FILE).write_bytes(content[:end])
        anchor_of(folder).write_bytes(anchor)
        assert len(ledger_in(folder).entries()) == 4
        if end % 97 == 0:
            ledger_in(folder).reserve([entry(3)], budget=BUDGET)
            assert len(ledger_in(folder).entries()) == 5
    # Whole, but the anchor does not know of it: spent.
    (folder / FILE).write_bytes(content)
    anchor_of(folder).write_bytes(anchor)
    assert len(ledger_in(folder).entries()) == 6


def test_after_a_crash_at_most_one_line_is_unknown_to_the_anchor(folder: Path) -> None:
    filled(folder, 2)
    anchor = anchor_of(folder).read_bytes()
    ledger_in(folder).reserve([entry(3)], budget=BUDGET)
    anchor_of(folder).write_bytes(anchor)
    content = (folder / FILE).read_bytes()
    # No crash leaves a part of a line after one that the anchor does not know.
    (folder / FILE).write_bytes(content + b'{"budget"')
    with pytest.raises(PrivacyRefusal, match="does not fit its anchor"):
        ledger_in(folder).entries()


KILLED = """
import json, os, shutil, signal, sys
from itertools import count
from pathlib import Path
from tests.privacy.ledgers import BUDGET, entry, filled, ledger_in
from crossward.privacy.dp.ledger import FILE

def arm(point):
    # Dies at the so-and-so-many-th moment before, in the midst of, or after a call that changes something on disk.
    moments = count()
    def moment():
        if next(moments) == point:
            os.kill(os.getpid(), signal.SIGKILL)
    def watched(real):
        def call(*given, **more):
            moment()
            result = real(*given, **more)
            moment()
            return result
        return call
    write = watched(os.write)
    def torn(descriptor, data):
        if next(moments) == point:
            real_write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)
    real_write = os.write
    for name in ("fsync", "replace", "mkdir", "chmod", "ftruncate", "open", "close"):
        setattr(os, name, watched(getattr(os, name)))
    os.write = torn

root, lines = Path(sys.argv[1]), int(sys.argv[2])
start = root / "start" / "chest"
filled(start, lines)
if not lines:
    ledger_in(start)
seen = []
for point in count():
    here = root / str(point) / "chest"
    shutil.copytree(start.parent, here.parent)
    ledger = ledger_in(here)
    child = os.fork()
    if not child:
        arm(point)
        ledger.reserve([entry(9), entry(9, what="prototypes", noise=20.0)], budget=BUDGET)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    content = (here / FILE).read_bytes() if (here / FILE).exists() else b""
    found = len(ledger_in(here).lines())
    spent = ledger_in(here).spent(delta=1e-5)
    ledger_in(here).reserve([entry(10)], budget=BUDGET)
    after = len(ledger_in(here).lines())
    seen.append({"found": found, "spent": spent, "after": after, "torn": bool(content.rpartition(b"\\n")[2])})
    if not status:
        break
print(json.dumps(seen))
"""


def script(text: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("lines", [0, 2])
def test_a_kill_at_any_moment_leaves_a_ledger_that_holds(tmp_path: Path, lines: int) -> None:
    with script(KILLED, tmp_path, lines) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    seen = json.loads(out)
    assert len(seen) > 20
    found = [each["found"] for each in seen]
    # Once the line is whole it counts as spent, whatever comes after.
    assert set(found) == {lines, lines + 1}
    assert found == sorted(found)
    assert found.count(lines + 1) > 5, "some were killed between the line and the anchor"
    assert sum(each["torn"] for each in seen) == 1
    assert not seen[-1]["torn"]
    assert all(each["after"] == each["found"] + 1 for each in seen)
    costs = {lines: cost(*[NOISE, 20.0] * lines) if lines else 0.0, lines + 1: cost(*[NOISE, 20.0] * (lines + 1))}
    assert all(each["spent"] == costs[each["found"]] for each in seen)


@pytest.fixture
def synced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is written, put on disk and renamed, in its order."""
    log: list[tuple[str, str]] = []
    real_write, real_fsync, real_replace = os.write, os.fsync, os.replace

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def write(descriptor: int, data: bytes) -> int:
        log.append(("write", name(descriptor)))
        return real_write(descriptor, data)

    def fsync(descriptor: int) -> None:
        log.append(("sync", name(descriptor).replace(f".{os.getpid()}.part", "")))
        real_fsync(descriptor)

    def replace(source: str | Path, target: str | Path) -> None:
        log.append(("rename", Path(target).name))
        real_replace(source, target)

    signer_of(folder)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return log


ANCHOR = [("sync", ".chest.json"), ("rename", "chest.json"), ("sync", "chest-anchor")]
LINE = [("write", FILE), ("sync", FILE)]


def test_a_line_is_on_disk_before_its_anchor_and_both_before_the_step(
    folder: Path, synced: list[tuple[str, str]]
) -> None:
    """A kill leaves what was written in the system's memory; a power failure leaves only what was put on disk."""
    ledger = ledger_in(folder)
    ledger.reserve([entry(1)], budget=BUDGET)
    folders = [("sync", "ledgers"), ("sync", "ledgers")]
    assert [each for each in synced if each not in folders] == [*ANCHOR, *LINE, ("sync", "chest"), *ANCHOR]
    assert synced.count(folders[0]) == 2, "both new folders are in the folder above"
    synced.clear()
    ledger.reserve([entry(2)], budget=BUDGET)
    assert synced == [*LINE, *ANCHOR]
    # A line that a killed process left behind is put on disk before an anchor says that it is there.
    before = anchor_of(folder).read_bytes()
    ledger.reserve([entry(3)], budget=BUDGET)
    anchor_of(folder).write_bytes(before)
    synced.clear()
    ledger.reserve([entry(4)], budget=BUDGET)
    assert synced == [("sync", FILE), ("sync", "chest"), *ANCHOR, *LINE, *ANCHOR]


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(path: Path) -> None:
    """Write until the disk has no byte left."""
    with path.open("wb", buffering=0) as stream:
        for size in (1 << 12, 1):
            try:
                while stream.write(bytes(size)):
                    pass
            except OSError:
                continue


def until_full(ledger: Ledger) -> tuple[int, str]:
    """Reserve until nothing more can be written; gives how often that went well, and what is said then."""
    for number in range(10_000):
        try:
            ledger.reserve([entry(number, noise=1e4)], budget=BUDGET)
        except StorageFailure as error:
            return number, str(error)
    raise AssertionError("the disk is never full")


@pytest.mark.parametrize("full", ["ledger", "anchor"])
def test_a_full_disk_stops_the_step_and_loses_nothing(small_disk: Path, tmp_path: Path, full: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = (small_disk if full == "ledger" else elsewhere) / "chest"
    anchors = (elsewhere if full == "ledger" else small_disk) / "anchors"
    signer = local_signer(elsewhere / "key.pem", ledger=folder)
    ledger = ledger_in(folder, signer=signer, anchor=anchors)
    ledger.reserve([entry(0)], budget=BUDGET)
    ballast = small_disk / "ballast"
    fill(ballast)
    done, said = until_full(ledger)
    assert "disk full" in said
    assert "free some space and resume" in said
    counted = len(ledger.entries())
    # What was promised is there; a line whose anchor could not be written counts as spent.
    assert counted == 1 + done + (full == "anchor")
    with pytest.raises(StorageFailure, match="disk full"):
        ledger.reserve([entry(1)], budget=BUDGET)
    assert len(ledger.entries()) == counted
    ballast.unlink()
    ledger.reserve([entry(1)], budget=BUDGET)
    assert len(ledger.entries()) == counted + 1


SHORT = """
import resource, sys
from pathlib import Path
from tests.privacy.ledgers import BUDGET, entry, ledger_in
from crossward.federation.errors import StorageFailure
from crossward.privacy.dp.ledger import FILE

folder = Path(sys.argv[1])
ledger = ledger_in(folder)
size = (folder / FILE).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
try:
    ledger.reserve([entry(2)], budget=BUDGET)
except StorageFailure as error:
    print(error)
print((folder / FILE).stat().st_size == size)
"""


def test_a_disk_that_takes_a_part_of_a_line_gives_it_back(folder: Path) -> None:
    filled(folder, 1)
    with script(SHORT, folder) as process:
        said, same = process.communicate(timeout=120)[0].splitlines()
    assert "disk full while writing the privacy ledger" in said
    assert same == "True"
    ledger_in(folder).reserve([entry(2)], budget=BUDGET)
    assert len(ledger_in(folder).lines()) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everywhere")
def test_a_ledger_that_cannot_be_read_or_written_is_refused(whole: Path) -> None:
    (whole / FILE).chmod(0)
    with pytest.raises(PrivacyRefusal, match="cannot be read"):
        ledger_in(whole).entries()


def test_a_folder_in_the_ledgers_place_is_refused(folder: Path) -> None:
    filled(folder, 1)
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(PrivacyRefusal, match="cannot be read"):
        ledger_in(folder).entries()


# Two at once

TOGETHER = """
import sys
from pathlib import Path
from tests.privacy.ledgers import entry, ledger_in
from crossward.privacy.dp.accounting import Budget
from crossward.privacy.dp.ledger import BudgetSpent

folder, run, budget = Path(sys.argv[1]), sys.argv[2], Budget(float(sys.argv[3]), 1e-5)
ledger = ledger_in(folder)
print("ready", flush=True)
sys.stdin.readline()
done = 0
try:
    while True:
        ledger.reserve([entry(done + 1, run=run)], budget=budget)
        done += 1
except BudgetSpent:
    print(done)
"""


def test_two_processes_share_one_budget(folder: Path) -> None:
    signer_of(folder)
    most = 24
    budget = cost(*[NOISE] * most) + 1e-6
    with script(TOGETHER, folder, "one", budget) as one, script(TOGETHER, folder, "two", budget) as two:
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        done = [int(process.communicate(timeout=120)[0]) for process in (one, two)]
    assert sum(done) == most
    entries = ledger_in(folder).entries()
    assert [sum(each.run == run for each in entries) for run in ("one", "two")] == done
    assert [each.number for each in entries] == list(range(1, most + 1))


HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("holding", flush=True)
sys.stdin.readline()
"""


def test_a_ledger_that_another_process_holds_is_waited_for_and_not_forever(folder: Path) -> None:
    filled(folder, 1)
    with script(HOLD, folder / ".lock") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        for attempt in (lambda ledger: ledger.entries(), lambda ledger: ledger.reserve([entry(2)], budget=BUDGET)):
            with pytest.raises(StorageFailure, match="another process holds the privacy ledger"):
                attempt(ledger_in(folder, patience=0.1))
        process.kill()
    # The kernel gives the lock back when its holder is killed.
    ledger_in(folder, patience=5).reserve([entry(2)], budget=BUDGET)


# Keys


def test_a_key_is_made_once_for_its_owner_alone(folder: Path) -> None:
    first = signer_of(folder)
    content = key_of(folder).read_bytes()
    assert key_of(folder).stat().st_mode & 0o777 == 0o600
    assert list(folder.parent.iterdir()) == [key_of(folder)]
    second = signer_of(folder)
    assert key_of(folder).read_bytes() == content
    assert first.label == second.label
    assert first.label.startswith("key ")
    assert second.verify(b"message", first.sign(b"message"))
    assert not second.verify(b"other message", first.sign(b"message"))


def test_a_missing_key_is_not_made_anew_beside_a_ledger(folder: Path) -> None:
    filled(folder, 1)
    key_of(folder).unlink()
    with pytest.raises(PrivacyRefusal, match=r"is missing, but there is a privacy ledger .* from the site's backup"):
        signer_of(folder)
    assert not key_of(folder).exists()


def test_a_key_that_others_can_read_or_that_is_none_is_refused(folder: Path) -> None:
    signer_of(folder)
    key_of(folder).chmod(0o640)
    with pytest.raises(PrivacyRefusal, match="can be read by others"):
        signer_of(folder)
    key_of(folder).chmod(0o600)
    key_of(folder).write_bytes(b"nothing")
    with pytest.raises(PrivacyRefusal, match="is not the key of a ledger"):
        signer_of(folder)
    other = ec.generate_private_key(ec.SECP256R1())
    key_of(folder).write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(PrivacyRefusal, match="another kind of key"):
        signer_of(folder)


def test_a_certificate_signs_and_its_successor_goes_on(folder: Path) -> None:
    authority = Authority()
    # An expired certificate: what was signed with it stays good.
    old, new = authority.identity("alder", days=-1), authority.identity("alder")
    first = certificate_signer(old)
    assert first.label.startswith("certificate ")
    ledger_in(folder, signer=first).reserve([entry(1)], budget=BUDGET)
    with pytest.raises(PrivacyRefusal, match="not signed with this site's key"):
        ledger_in(folder, signer=certificate_signer(new)).entries()
    second = certificate_signer(new, earlier=[old.certificate])
    ledger_in(folder, signer=second).reserve([entry(2)], budget=BUDGET)
    assert [line.signer for line in ledger_in(folder, signer=second).lines()] == [first.label, second.label]
    with pytest.raises(PrivacyRefusal, match="not signed with this site's key"):
        ledger_in(folder, signer=first).entries()


def test_a_kit_with_an_rsa_key_signs_too() -> None:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    authority = Authority()
    certificate = authority._issue("alder", key.public_key(), ca=False, days=2)  # type: ignore[arg-type]
    signer = certificate_signer(Identity(certificate, pem))
    assert signer.verify(b"message", signer.sign(b"message"))
    assert not signer.verify(b"other", signer.sign(b"message"))


def test_who_only_checks_needs_a_key_or_a_certificate(folder: Path, tmp_path: Path) -> None:
    filled(folder, 1)
    assert verifier(key_of(folder))(b"message", signer_of(folder).sign(b"message"))
    (tmp_path / "text").write_text("no key")
    with pytest.raises(PrivacyRefusal, match="in PEM"):
        verifier(tmp_path / "text")
    with pytest.raises(PrivacyRefusal, match="cannot be read"):
        verifier(tmp_path / "none")


# noise that sites share

_EARLIER = (
    b'{"budget":{"delta":1e-05,"epsilon":8.0},"entries":[{"noise":10.0,"part":"train","rate":1.0,"round":1,"run":"first",'
    b'"split":"","steps":1,"unit":"patient","what":"steps"},{"noise":20.0,"part":"train","rate":1.0,"round":1,'
    b'"run":"first","split":"","steps":1,"unit":"patient","what":"release"}],'
    b'"hash":"119f7d29e215fe7ef51734f61202610e5c0f84b6514980f687824a846605bc6f","ledger":"alder/chest","line":1,'
    b'"previous":"6de2b37d7b1fddd0e2cf2fb71706156555f10b5de07293ab14dce0f4f2a755bc","signature":"3f2178d329dc6a0381433d'
    b"9d6d60fee4e3b354e02eeadffa1e05136e28b9f503ce03002001ba7cc43c4dcb930ed31cd903303ad41db9c431e5b55a881142550b"
    b'","signer":"key fa91246b017591ff","time":"2026-11-19T19:57:27+00:00"}'
)
_EARLIER_KEY = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEA5zdJWgLKAMh4srnsitTG5DM+Ua/ni3qDVGL2KIJZRxo=
-----END PUBLIC KEY-----
"""


def test_a_line_from_before_entries_said_whose_noise_it_is_still_holds(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(_EARLIER_KEY)
    (line,) = read_lines([_EARLIER], name=NAME, verify=verifier(tmp_path / "key.pem"))
    assert [(each.what, each.shared) for each in line.entries] == [("steps", None), ("release", None)]


def test_a_line_without_shared_noise_is_written_as_it_always_was(folder: Path) -> None:
    ledger_in(folder).reserve([entry(1)], budget=BUDGET)
    written = json.loads((folder / FILE).read_bytes())
    assert written["entries"][0].keys() == json.loads(_EARLIER)["entries"][0].keys()


def test_an_entry_says_with_whom_the_noise_was_shared_and_cannot_be_made_to_say_less(folder: Path) -> None:
    ledger = ledger_in(folder)
    ledger.reserve([entry(1, noise=4.0, unit="site", shared=Shared(fewest=6, colluders=2))], budget=Budget(99.0, 1e-5))
    (found,) = ledger.entries()
    assert found.shared == Shared(fewest=6, colluders=2)
    # Against the server alone the same sums hold the noise of all six.
    assert found.alone.spending == Spending(4.0 * math.sqrt(6 / 4), 1.0, 1)
    text = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(text.replace(b'"colluders":2', b'"colluders":3'))
    with pytest.raises(PrivacyRefusal, match="changed"):
        ledger.entries()


@pytest.mark.parametrize(("fewest", "colluders"), [(2, 2), (3, -1), (3, True), ("3", 1)])
def test_noise_that_no_honest_site_would_bring_is_none(fewest: Any, colluders: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="share"):
        Shared(fewest=fewest, colluders=colluders)
