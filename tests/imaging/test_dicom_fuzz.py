"""A short run of the fuzzer; the long one is ``python -m tests.imaging.dicom_fuzz``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jpeg_ls
import numpy as np
import pytest
from pydicom import uid
from tests.imaging.dicom_files import write_scan
from tests.imaging.dicom_fuzz import KINDS, READ, cut, fuzz, nonsense, same, table

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.refusals import Reason

GREY = np.random.default_rng(0).integers(0, 4096, (40, 30)).astype(np.uint16)


def made(folder: Path) -> list[Path]:
    stream = bytes(jpeg_ls.encode_array(GREY))
    return [
        write_scan(folder / "plain.dcm", GREY, BitsStored=12, RescaleSlope="2", RescaleIntercept="-1024"),
        write_scan(folder / "implicit.dcm", GREY, BitsStored=12, syntax=uid.ImplicitVRLittleEndian),
        write_scan(folder / "deflated.dcm", GREY, BitsStored=12, syntax=uid.DeflatedExplicitVRLittleEndian),
        write_scan(folder / "jls.dcm", GREY, BitsStored=12, syntax=uid.JPEGLSLossless, compressed=[stream]),
    ]


def test_no_damaged_copy_of_a_made_file_is_nonsense(tmp_path: Path) -> None:
    outcomes, wrong = fuzz(made(tmp_path), 300, 7, processes=0)
    assert wrong == []
    assert outcomes["cut"][READ] == 0
    assert sum(outcomes["bits"].values()) == 60
    # Some damage does not show, and some must: a reader that refuses or takes everything would pass otherwise.
    assert 0 < sum(counts[READ] for counts in outcomes.values()) < 200
    assert outcomes["cut"][Reason.DAMAGED.value] > 30


@pytest.mark.shared
def test_damaged_copies_of_real_files_cost_nobody_the_run(shared_data: Path) -> None:
    files = [path for path in sorted((shared_data / "dicom" / "files").iterdir()) if path.stat().st_size < 120_000]
    outcomes, wrong = fuzz(files, 150, 1, processes=2)
    assert wrong == [], table(outcomes)
    assert sum(sum(counts.values()) for counts in outcomes.values()) == 150
    assert not sum(counts[Reason.TIMED_OUT.value] for counts in outcomes.values())


def test_the_fuzzer_itself_would_notice(tmp_path: Path) -> None:
    scan = read_scan(made(tmp_path)[0])
    frame = scan.frames[0]
    assert nonsense(scan) == ""
    for broken in (
        replace(frame, values=frame.values[1:]),
        replace(frame, values=np.where(frame.values > 0, np.nan, frame.values).astype(np.float32)),
        replace(frame, high=float(frame.values.max()) - 1),
        replace(frame, valid=np.ones((2, 2), dtype=np.bool_)),
    ):
        assert nonsense(replace(scan, frames=(broken,)))
    assert nonsense(replace(scan, frames=()))
    assert not same(scan, replace(scan, frames=(replace(frame, values=frame.values + 1),)))
    content = bytes(range(200)) * 20
    for kind, damage in KINDS.items():
        assert damage(content, np.random.default_rng(3)) != content, kind
    assert content.startswith(cut(content, np.random.default_rng(3)))
