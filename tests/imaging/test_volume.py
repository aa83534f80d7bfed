from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.imaging.dicom_files import elements, item, write_scan

from crossward.imaging.dicom.files import read_header
from crossward.imaging.dicom.pixels import Limits
from crossward.imaging.dicom.scans import Header
from crossward.imaging.dicom.volume import order_slices, read_volume
from crossward.imaging.refusals import Reason, Refused

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
# Rows to the back, columns downwards: the normal points to the right, so slices rise with falling x.
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


def slice_at(z: float, number: int | None = None, **facts: Any) -> Header:
    usual = {"position": (5.0, 6.0, z), "orientation": AXIAL, "spacing": (0.5, 0.75), "rows": 4, "columns": 3}
    return Header(**(usual | {"instance_number": number} | facts))


def reason(headers: list[Header]) -> Reason:
    with pytest.raises(Refused) as refused:
        order_slices(headers)
    return refused.value.reason


@given(st.permutations(list(range(7))), st.sampled_from([0.6, 2.5, 10.0]))
def test_any_order_is_sorted_by_position(shuffled: list[int], step: float) -> None:
    """Instance numbers run the other way, and do not count."""
    series = order_slices([slice_at(step * place, 100 - place) for place in shuffled])
    assert [shuffled[number] for number in series.order] == list(range(7))
    assert (series.by, series.gaps, series.duplicates, series.problems) == ("position", (), (), ())
    assert series.spacing == pytest.approx(step)


def test_the_normal_says_which_way_is_up() -> None:
    headers = [slice_at(0, orientation=SAGITTAL, position=(x, 0.0, 0.0)) for x in (0.0, 4.0, 2.0)]
    # normal = (0, 1, 0) x (0, 0, -1) = (-1, 0, 0)
    assert order_slices(headers).order == (1, 2, 0)


def test_gaps_and_copies_are_told() -> None:
    series = order_slices([slice_at(z) for z in (0, 2, 4, 10, 12, 2, 14, 2)])
    assert series.spacing == 2.0
    assert series.order == (0, 1, 5, 7, 2, 3, 4, 6)
    assert series.duplicates == ((1, 5, 7),)
    assert series.gaps == (4,)
    assert len(series.problems) == 2


def test_uneven_and_shifted_slices_are_told() -> None:
    assert order_slices([slice_at(z) for z in (0, 2, 4.4, 6.4, 8.4)]).problems == ("slices are not evenly spaced",)
    shifted = [slice_at(z, position=(5.0 + (z == 4), 6.0, z)) for z in (0.0, 2.0, 4.0, 6.0)]
    assert order_slices(shifted).problems == ("slices are not one above the other",)
    rounded = [slice_at(z) for z in (0.0, 0.333, 0.667, 1.0)]
    assert order_slices(rounded).problems == ()


def test_instance_numbers_count_only_without_positions() -> None:
    bare = {"position": None, "orientation": None}
    series = order_slices([slice_at(0, number, **bare) for number in (3, 1, 2)])
    assert (series.order, series.by, series.spacing) == ((1, 2, 0), "instance number", None)
    assert series.problems
    assert reason([slice_at(0, number, **bare) for number in (3, 1, 1)]) is Reason.GEOMETRY
    assert reason([slice_at(0, number, **bare) for number in (3, None)]) is Reason.GEOMETRY
    assert reason([slice_at(0, 1), slice_at(0, 2, **bare)]) is Reason.GEOMETRY


@pytest.mark.parametrize(
    "other",
    [
        {"orientation": SAGITTAL},
        {"orientation": (1.0, 0.0, 0.0, 0.0, 0.98, 0.199)},
        {"spacing": (0.5, 0.8)},
        {"rows": 5},
        {"frame_of_reference": "9.9"},
    ],
)
def test_slices_of_another_stack_are_refused(other: dict[str, Any]) -> None:
    assert reason([slice_at(0), slice_at(2), slice_at(4, **other)]) is Reason.GEOMETRY


def test_directions_must_be_at_right_angles() -> None:
    skewed = (1.0, 0.0, 0.0, 0.6, 0.8, 0.0)
    assert reason([slice_at(z, orientation=skewed) for z in (0.0, 2.0)]) is Reason.GEOMETRY
    assert reason([]) is Reason.GEOMETRY


def write_series(folder: Path, *, places: list[float], tilt: float = 0.0, **tags: Any) -> list[Path]:
    """Slices whose pixels are ten times their place in the list, plus the pixel's own number."""
    paths = []
    for number, place in enumerate(places):
        pixels = (np.arange(12, dtype=np.int16) + 100 * number).reshape(4, 3)
        position = [1.0, 2.0 + tilt * place, 3.0 + place]
        usual = {
            "ImagePositionPatient": position,
            "ImageOrientationPatient": list(AXIAL),
            "PixelSpacing": [0.5, 0.75],
            "RescaleSlope": str(number + 1),
            "RescaleIntercept": "0",
        }
        paths.append(write_scan(folder / f"{number}.dcm", pixels, **(usual | tags)))
    return paths


def test_a_volume_has_its_values_spacing_and_place(tmp_path: Path) -> None:
    volume = read_volume(write_series(tmp_path, places=[4.0, 0.0, 2.0]))
    base = np.arange(12).reshape(4, 3)
    # Lowest first, each in its own units: slopes 2, 3 and 1.
    np.testing.assert_array_equal(volume.values, [(base + 100) * 2, (base + 200) * 3, base])
    assert volume.spacing == (2.0, 0.5, 0.75)
    np.testing.assert_allclose(volume.affine @ [0, 0, 0, 1], [1, 2, 3, 1])
    np.testing.assert_allclose(volume.affine @ [2, 0, 0, 1], [1, 2, 7, 1])
    np.testing.assert_allclose(volume.affine @ [0, 2, 0, 1], [1, 3, 3, 1])
    np.testing.assert_allclose(volume.affine @ [0, 0, 2, 1], [2.5, 2, 3, 1])
    assert (volume.low, volume.high, volume.valid) == (-98304.0, 98301.0, None)


def test_a_tilted_gantry_is_in_the_affine(tmp_path: Path) -> None:
    volume = read_volume(write_series(tmp_path, places=[0.0, 2.0, 4.0], tilt=0.1))
    assert volume.spacing[0] == pytest.approx(2.0)
    np.testing.assert_allclose(volume.affine @ [2, 0, 0, 1], [1, 2.4, 7, 1])


@pytest.mark.parametrize("places", [[0.0, 2.0, 6.0, 8.0], [0.0, 2.0, 2.0], [0.0, 2.0, 4.3, 6.3]])
def test_a_stack_that_is_not_whole_is_no_volume(places: list[float], tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_volume(write_series(tmp_path, places=places))
    assert refused.value.reason is Reason.GEOMETRY


def test_what_makes_no_volume(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "a", places=[0.0, 2.0])
    with pytest.raises(Refused) as refused:
        read_volume(paths, limits=Limits(bytes_total=60))
    assert refused.value.reason is Reason.TOO_LARGE
    mixed = [*paths, *write_series(tmp_path / "b", places=[4.0], PhotometricInterpretation="MONOCHROME1")]
    with pytest.raises(Refused) as refused:
        read_volume(mixed)
    assert refused.value.reason is Reason.PHOTOMETRIC
    one = write_series(tmp_path / "c", places=[0.0])
    with pytest.raises(Refused) as refused:
        read_volume(one)
    assert refused.value.reason is Reason.GEOMETRY
    thick = read_volume(write_series(tmp_path / "d", places=[0.0], SliceThickness="5"))
    assert (thick.values.shape, thick.spacing) == ((1, 4, 3), (5.0, 0.5, 0.75))
    plain = write_series(tmp_path / "e", places=[0.0, 2.0], ImagePositionPatient=None)
    with pytest.raises(Refused) as refused:
        read_volume(plain)
    assert refused.value.reason is Reason.GEOMETRY


def test_padding_of_one_slice_is_marked_in_the_volume(tmp_path: Path) -> None:
    paths = write_series(tmp_path, places=[0.0, 2.0], PixelPaddingValue=105)
    valid = read_volume(paths).valid
    assert valid is not None
    np.testing.assert_array_equal(np.argwhere(~valid), [[1, 1, 2]])


def test_an_enhanced_file_is_a_volume_whatever_the_order_of_its_frames(tmp_path: Path) -> None:
    pixels = (np.arange(36, dtype=np.uint16)).reshape(3, 4, 3)
    shared = item(
        PixelMeasuresSequence=item(PixelSpacing=[0.5, 0.75], SliceThickness=3),
        PlaneOrientationSequence=item(ImageOrientationPatient=list(AXIAL)),
    )
    frames = [
        elements(
            PlanePositionSequence=item(ImagePositionPatient=[0, 0, z]),
            PixelValueTransformationSequence=item(RescaleSlope="1", RescaleIntercept=str(1000 * z)),
        )
        for z in (6, 0, 3)
    ]
    path = write_scan(
        tmp_path / "enhanced.dcm",
        pixels,
        NumberOfFrames=3,
        SharedFunctionalGroupsSequence=shared,
        PerFrameFunctionalGroupsSequence=frames,
    )
    volume = read_volume([path])
    np.testing.assert_array_equal(volume.values, [pixels[1], pixels[2] + 3000, pixels[0] + 6000])
    assert volume.spacing == (3.0, 0.5, 0.75)


@pytest.mark.shared
def test_a_real_enhanced_file(shared_data: Path) -> None:
    (path,) = (shared_data / "dicom" / "files").glob("042_*")
    header = read_header(path)
    volume = read_volume([path])
    assert volume.values.shape == (header.frames, header.rows, header.columns)
    assert np.linalg.norm(volume.affine[:3, 0]) == pytest.approx(volume.spacing[0], rel=1e-3)
    # Slices before rows before columns is a left-handed order of axes.
    assert np.linalg.det(volume.affine[:3, :3]) == pytest.approx(-np.prod(volume.spacing), rel=1e-3)
