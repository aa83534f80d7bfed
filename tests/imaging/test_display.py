"""Grey levels by hand from PS3.3 C.11.2, and against dcmtk where it is installed."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from tests.imaging.dicom_files import lookup_table, write_scan

from crossward.imaging.dicom.display import apply_window, display, unit
from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.scans import Frame, Table, Window
from crossward.imaging.refusals import Refused

VALUES = np.array([[-100.0, 0.0, 40.0, 41.0, 240.0]], dtype=np.float32)


def frame(values: np.ndarray = VALUES, **facts: Any) -> Frame:
    return Frame(index=0, **({"values": values, "valid": None, "low": -1024.0, "high": 3071.0} | facts))


def test_the_linear_window_of_the_standard() -> None:
    """With centre 2048 and width 4096 the standard's own example maps 0..4095 onto the whole range."""
    whole = apply_window(np.array([-1.0, 0.0, 4095.0, 4096.0]), Window(2048, 4096))
    np.testing.assert_allclose(whole, [0, 0, 1, 1])
    # (x - (40 - 0.5)) / (200 - 1) + 0.5
    np.testing.assert_allclose(apply_window(np.array([40.0, 0.0]), Window(40, 200)), [0.502513, 0.301508], atol=1e-6)
    np.testing.assert_allclose(apply_window(np.array([9.4, 9.5, 9.6]), Window(10, 1)), [0, 0, 1])


def test_the_exact_window_and_the_sigmoid() -> None:
    np.testing.assert_allclose(
        apply_window(np.array([-60.0, 40.0, 90.0, 140.0]), Window(40, 200, "LINEAR_EXACT")), [0, 0.5, 0.75, 1]
    )
    expected = [1 / (1 + math.exp(-4 * (x - 40) / 200)) for x in (-60.0, 40.0, 140.0)]
    np.testing.assert_allclose(apply_window(np.array([-60.0, 40.0, 140.0]), Window(40, 200, "SIGMOID")), expected)
    assert apply_window(np.array([-1e30, 1e30]), Window(0, 1e-3, "SIGMOID")).tolist() == pytest.approx([0, 1])


def test_the_window_is_chosen_by_its_number() -> None:
    two = frame(windows=(Window(40, 200, "LINEAR_EXACT"), Window(0, 400, "LINEAR_EXACT")))
    assert display(two).tolist() == [[0, 76, 128, 129, 255]]
    assert display(two, window=1).tolist() == [[64, 128, 153, 154, 255]]
    with pytest.raises(Refused, match="2 windows"):
        display(two, window=2)


def test_without_windows_the_range_counts() -> None:
    assert display(frame()).tolist() == [[0, 75, 105, 106, 255]]
    # (x + 1024) / 4095 * 255
    assert display(frame(), range="stored").tolist() == [[58, 64, 66, 66, 79]]
    assert display(frame(windows=(Window(40, 200),)), window=None).tolist() == [[0, 75, 105, 106, 255]]
    assert display(frame(np.full((1, 2), 7, dtype=np.float32))).tolist() == [[0, 0]]


def test_a_table_goes_before_windows_and_keeps_its_ends() -> None:
    table = Table(0.0, np.array([0.2, 0.4, 0.6], dtype=np.float32))
    values = np.array([[-5.0, 0.0, 0.6, 2.0, 9.0]], dtype=np.float32)
    shown = display(frame(values, table=table, windows=(Window(0, 10),)))
    assert shown.tolist() == [[51, 51, 102, 153, 153]]


def test_monochrome1_is_turned_and_padding_is_black() -> None:
    valid = np.array([[False, True, True, True, True]])
    turned = frame(inverted=True, valid=valid)
    # From 0 to 240 among the valid ones.
    assert display(turned).tolist() == [[0, 255, 212, 211, 0]]
    np.testing.assert_allclose(unit(turned)[0, :2], [0, 1 - 1024 / 4095], atol=1e-6)
    nothing = replace(turned, valid=np.zeros_like(valid))
    assert not display(nothing).any()
    assert not unit(nothing).any()


def test_colour_is_shown_as_it_is() -> None:
    colour = frame(np.array([[[0.0, 0.5, 1.0]]], dtype=np.float32), low=0.0, high=1.0)
    assert display(colour).tolist() == [[[0, 128, 255]]]
    assert unit(colour) is colour.values


@given(
    values=arrays.arrays(np.float32, (3, 4), elements=st.floats(-1024, 3071, width=32)),
    window=st.builds(
        Window,
        st.floats(-500, 500),
        st.floats(1.5, 4000),
        st.sampled_from(["LINEAR", "LINEAR_EXACT", "SIGMOID"]),
    ),
    inverted=st.booleans(),
)
def test_greys_keep_the_order_of_the_values(values: np.ndarray, window: Window, inverted: bool) -> None:
    shown = display(frame(values, windows=(window,), inverted=inverted)).astype(int).ravel()
    order = np.argsort(values.ravel())
    steps = np.diff(shown[order])
    assert (steps <= 0).all() if inverted else (steps >= 0).all()
    scaled = unit(frame(values, inverted=inverted))
    assert scaled.dtype == np.float32
    assert scaled.min() >= 0
    assert scaled.max() <= 1


RAMP = np.arange(64, dtype=np.int16).reshape(8, 8) * 60 - 1024
VOI = lookup_table([256, -100, 8], bytes(255 - value for value in range(256)))
WIDE_VOI = lookup_table([256, -100, 16], struct.pack("<256H", *(min(65535, value * value) for value in range(256))))
DCMTK: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "window 1": ({"WindowCenter": ["40", "500"], "WindowWidth": ["400", "2000"]}, ["+Wi", "1"], {}),
    "window 2": ({"WindowCenter": ["40", "500"], "WindowWidth": ["400", "2000"]}, ["+Wi", "2"], {"window": 1}),
    "sigmoid": (
        {"WindowCenter": "40", "WindowWidth": "400", "VOILUTFunction": "SIGMOID"},
        ["+Wi", "1", "+Wfs"],
        {},
    ),
    "rescaled": (
        {"WindowCenter": "40", "WindowWidth": "900", "RescaleSlope": "0.5", "RescaleIntercept": "3"},
        ["+Wi", "1"],
        {},
    ),
    "MONOCHROME1": (
        {"WindowCenter": "40", "WindowWidth": "900", "PhotometricInterpretation": "MONOCHROME1"},
        ["+Wi", "1"],
        {},
    ),
    "VOI table": ({"VOILUTSequence": VOI}, ["+Wl", "1"], {}),
    "VOI table of 16 bits": ({"VOILUTSequence": WIDE_VOI}, ["+Wl", "1"], {}),
    "min and max": ({}, ["+Wm"], {}),
    "stored range": ({"BitsStored": 13}, ["-W"], {"range": "stored"}),
}


@pytest.mark.parametrize("name", DCMTK)
def test_grey_levels_are_dcmtks(name: str, tmp_path: Path) -> None:
    if shutil.which("dcm2pnm") is None:
        pytest.skip("dcmtk is not installed")
    tags, options, how = DCMTK[name]
    path = write_scan(tmp_path / "scan.dcm", RAMP, **tags)
    out = tmp_path / "out.pgm"
    subprocess.run(["dcm2pnm", "-O", *options, "+op", str(path), str(out)], check=True)
    theirs = np.asarray(Image.open(out)).astype(int)
    ours = display(read_scan(path).frames[0], **how).astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_windows_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    good = {"WindowCenter": ["40", "50"], "WindowWidth": ["400", "350"]}
    path = tmp_path / "scan.dcm"
    assert len(read_scan(write_scan(path, RAMP, **good)).frames[0].windows) == 2
    for bad in (
        {"WindowWidth": ["400", "0"]},
        {"WindowWidth": ["400", "-1"]},
        {"WindowWidth": ["400"]},
        {"WindowCenter": ["40", "Infinity"]},
        {"VOILUTFunction": "OTHER"},
    ):
        read = read_scan(write_scan(path, RAMP, **(good | bad))).frames[0]
        assert read.windows == ()
        np.testing.assert_array_equal(read.values, RAMP)
