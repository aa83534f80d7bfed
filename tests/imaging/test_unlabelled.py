"""Images without labels: what can be read is read, the rest is counted by reason and never by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.imaging.conftest import WriteDicom

from crossward.federation.errors import BadInput
from crossward.imaging.held_out import NO_CLASS
from crossward.imaging.unlabelled import load_unlabelled


def film(value: int, shape: tuple[int, ...] = (12, 12)) -> np.ndarray:
    return np.full(shape, value, dtype=np.uint8)


def test_every_dicom_file_below_the_folder_is_read(tmp_path: Path, write_dicom: WriteDicom) -> None:
    write_dicom(tmp_path / "a" / "one.dcm", film(0))
    write_dicom(tmp_path / "b" / "deep" / "without-ending", film(255))
    (tmp_path / "notes.txt").write_text("not an image")
    found = load_unlabelled(tmp_path, size=8, channels=1)
    assert found.split.ids == ("a/one.dcm", "b/deep/without-ending")
    assert found.split.images.shape == (2, 1, 8, 8)
    assert found.split.labels.tolist() == [NO_CLASS] * 2
    assert found.split.images[0].unique().tolist() == [-2.0]
    assert found.split.images[1].unique().tolist() == [2.0]
    assert found.scanner == "Maker Model 1"
    assert not found.rejected


def test_what_cannot_be_read_is_counted_by_reason_without_its_name(tmp_path: Path, write_dicom: WriteDicom) -> None:
    write_dicom(tmp_path / "good.dcm", film(9))
    for name in ("JONES^MARY.dcm", "SMITH^ANN.dcm"):
        whole = write_dicom(tmp_path / name, film(9)).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    write_dicom(tmp_path / "colour.dcm", np.zeros((12, 12, 3), dtype=np.uint8))
    write_dicom(tmp_path / "DOE: JANE.dcm", film(9, (2, 40)))
    found = load_unlabelled(tmp_path, size=8, channels=1)
    assert found.split.ids == ("good.dcm",)
    assert found.rejected.total() == 4
    assert not any(name in reason for reason in found.rejected for name in ("JONES", "SMITH", "colour.dcm", "JANE"))
    assert any("colour" in reason for reason in found.rejected)


def test_grey_images_get_the_channels_of_a_colour_study(tmp_path: Path, write_dicom: WriteDicom) -> None:
    write_dicom(tmp_path / "one.dcm", film(51))
    images = load_unlabelled(tmp_path, size=8, channels=3).split.images
    assert images.shape == (1, 3, 8, 8)
    assert torch.equal(images[:, 0], images[:, 2])


def test_a_pipe_and_a_loop_of_links_do_not_hold_it_up(tmp_path: Path, write_dicom: WriteDicom) -> None:
    write_dicom(tmp_path / "one.dcm", film(1))
    os.mkfifo(tmp_path / "pipe.dcm")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert load_unlabelled(tmp_path, size=8, channels=1).split.ids == ("one.dcm",)


def test_nothing_to_read_is_said_with_the_reasons(tmp_path: Path, write_dicom: WriteDicom) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        load_unlabelled(tmp_path / "nowhere", size=8, channels=1)
    with pytest.raises(BadInput, match="no DICOM image that can be read; check"):
        load_unlabelled(tmp_path, size=8, channels=1)
    write_dicom(tmp_path / "colour.dcm", np.zeros((12, 12, 3), dtype=np.uint8))
    with pytest.raises(BadInput, match="1 x in colour"):
        load_unlabelled(tmp_path, size=8, channels=1)
