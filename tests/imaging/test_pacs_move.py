from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from pydicom import dcmread
from tests.imaging.orthanc import (
    OUR_TITLE,
    TITLE,
    Orthanc,
    assert_same_images,
    free_port,
    killing,
    phantom_studies,
    running,
    study_uid,
)

from crossward.federation.errors import BadInput, RunFailure, StorageFailure
from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.move import MovingArchive, Peer
from crossward.imaging.pacs.pull import Pulled, pull
from crossward.imaging.pacs.query import Query
from crossward.imaging.pacs.store import Received, Receiver
from crossward.imaging.pacs.trouble import Patience, Retrying, Trouble

ALL = Query(since=date(2024, 1, 1), until=date(2024, 1, 31))
QUICK = Patience(attempts=5, first=0.02, longest=0.1)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return phantom_studies(tmp_path_factory.mktemp("films"), 20)


def move_pull(
    archive: Orthanc,
    out: Path,
    query: Query = ALL,
    *,
    peer: str = "",
    title: str = OUR_TITLE,
    patience: Patience = QUICK,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Pulled, Received]:
    named = Peer.parse(peer or f"{TITLE}@127.0.0.1:{archive.dicom_port}")
    port = archive.our_port
    with (
        ImageFolder(out) as images,
        Receiver(images, title=title, port=port, callers=[TITLE], address="127.0.0.1", only_expected=True) as receiver,
        MovingArchive(named, receiver=receiver, retrying=Retrying(patience), seconds=20) as source,
    ):
        return pull(source, query, images, progress=progress), receiver.received


def test_every_file_comes_once_and_not_again(archive: Orthanc, films: dict[str, Path], tmp_path: Path) -> None:
    first, received = move_pull(archive, tmp_path / "out")
    assert (first.studies, first.files, first.present, first.complete) == (4, 20, 0, True)
    assert (received.files, received.same, received.bytes) == (20, 0, first.bytes)
    assert_same_images(tmp_path / "out" / "images", films)
    # Of one study an image goes, of another a whole series: only these are asked for.
    with ImageFolder(tmp_path / "out") as images:
        lost = [uid for uid, film in films.items() if dcmread(film).SeriesInstanceUID == f"{study_uid(1)}.0"]
        lost.append(next(uid for uid, film in films.items() if dcmread(film).StudyInstanceUID == study_uid(2)))
        for uid in lost:
            images.path(uid).unlink()
    second, received = move_pull(archive, tmp_path / "out")
    assert len(lost) == 4
    assert (second.files, second.present, second.complete) == (4, 16, True)
    assert (received.files, received.same) == (4, 0)


def test_an_archive_that_is_killed_and_comes_back_costs_only_retries(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    patience = Patience(attempts=10, first=0.1, longest=0.5)
    progress = killing(archive, 7, restart=True)
    pulled, received = move_pull(archive, tmp_path / "out", patience=patience, progress=progress)
    assert (pulled.files, pulled.complete) == (20, True)
    assert pulled.retries >= 1
    assert received.files == 20
    assert_same_images(tmp_path / "out" / "images", films)


def test_an_archive_that_stays_away_ends_the_pull_and_the_next_goes_on(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunFailure, match=rf"^{TITLE}@127\.0\.0\.1:{archive.dicom_port}: does not answer; "):
        move_pull(archive, tmp_path / "out", progress=killing(archive, 7, restart=False))
    there = len(list((tmp_path / "out" / "images").rglob("*.dcm")))
    assert 7 <= there < 20
    archive.start()
    pulled, received = move_pull(archive, tmp_path / "out")
    assert (pulled.files, pulled.present, pulled.complete) == (20 - there, there, True)
    assert (received.files, received.same) == (20 - there, 0)
    assert_same_images(tmp_path / "out" / "images", films)


def test_half_a_study_gone_is_told_and_the_rest_comes(films: dict[str, Path], tmp_path: Path) -> None:
    with running(tmp_path) as orthanc:
        names = [orthanc.upload(film) for film in list(films.values())[:16:4]]
        for name in names[:2]:
            orthanc.attachment(name).unlink()
        orthanc.kill()
        orthanc.start()
        pulled, _ = move_pull(orthanc, tmp_path / "out")
        assert (pulled.studies, pulled.files, dict(pulled.missing)) == (1, 2, {Trouble.NOT_DELIVERED: 2})
        for name, film in zip(names[:2], list(films.values())[:16:4], strict=False):
            orthanc.ask(f"/instances/{name}", method="DELETE")
            orthanc.upload(film)
        again, _ = move_pull(orthanc, tmp_path / "out")
        assert (again.files, again.present, again.complete) == (2, 2, True)


def test_the_question_decides_which_studies_come(archive: Orthanc, tmp_path: Path) -> None:
    query = Query(studies={study_uid(3): 1, "1.2.3.4": 2}, accessions={"PLANTED-1": 5}, modalities=("DX",))
    pulled, _ = move_pull(archive, tmp_path / "out", query)
    assert (pulled.studies, pulled.files, pulled.not_found) == (2, 10, {"studies": [2]})


def test_wrong_titles_and_addresses_are_one_line(archive: Orthanc, tmp_path: Path) -> None:
    port = archive.dicom_port
    with pytest.raises(BadInput, match="refuses the connection; check its AE title"):
        move_pull(archive, tmp_path / "a", peer=f"SOMEBODY@127.0.0.1:{port}")
    with pytest.raises(RunFailure, match="does not answer"):
        move_pull(archive, tmp_path / "b", peer=f"{TITLE}@127.0.0.1:{free_port()}")
    with pytest.raises((BadInput, RunFailure), match=f"^{TITLE}@"):
        move_pull(archive, tmp_path / "c", title="STRANGER")


def test_an_archive_that_knows_us_elsewhere_gets_nowhere(films: dict[str, Path], tmp_path: Path) -> None:
    modalities = {"us": [OUR_TITLE, "127.0.0.1", free_port()]}
    with running(tmp_path, DicomModalities=modalities) as orthanc:
        orthanc.upload(next(iter(films.values())))
        pulled, _ = move_pull(orthanc, tmp_path / "out")
    assert dict(pulled.missing) == {Trouble.NOT_DELIVERED: 1}


@pytest.mark.parametrize("text", ["PACS", "PACS@host", "@host:104", "PACS@host:0", "PACS@:104", "P\\A@host:104"])
def test_a_peer_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        Peer.parse(text)


def test_a_peer_is_title_host_and_port() -> None:
    assert Peer.parse("A@B@[::1]:104") == Peer("A@B", "::1", 104)


def storescu(receiver: Receiver, *files: Path, caller: str = "SCANNER", called: str = OUR_TITLE) -> int:
    """Sends with DCMTK, an implementation that shares nothing with ours."""
    program = shutil.which("storescu")
    if program is None:
        pytest.skip("dcmtk is not installed (see tests/debian)")
    command = [program, "-aet", caller, "-aec", called, "127.0.0.1", str(receiver.port), *map(str, files)]
    return subprocess.run(command, capture_output=True, timeout=30).returncode


def receiver_in(images: ImageFolder) -> Receiver:
    return Receiver(images, title=OUR_TITLE, port=0, callers=["SCANNER", "PACS"], address="127.0.0.1")


def test_a_receiver_takes_what_listed_callers_send(films: dict[str, Path], tmp_path: Path) -> None:
    sent = dict(list(films.items())[:5])
    with ImageFolder(tmp_path / "out") as images, receiver_in(images) as receiver:
        assert storescu(receiver, *sent.values()) == 0
        assert storescu(receiver, *sent.values()) == 0
        assert storescu(receiver, *sent.values(), caller="STRANGER") != 0
        assert storescu(receiver, *sent.values(), called="SOMEBODY") != 0
        uid, film = next(iter(sent.items()))
        corrected = dcmread(film)
        corrected.PatientID = "PLANTED-CORRECTED"
        corrected.save_as(tmp_path / "corrected.dcm")
        assert storescu(receiver, tmp_path / "corrected.dcm") == 0
        assert dcmread(images.path(uid)).PatientID == "PLANTED-CORRECTED"
    counts = receiver.received
    assert (counts.files, counts.same, counts.replaced, counts.rejected) == (5, 5, 1, 2)
    assert_same_images(tmp_path / "out" / "images", {**sent, uid: tmp_path / "corrected.dcm"})


def test_a_full_disk_is_answered_as_out_of_resources(films: dict[str, Path], tmp_path: Path) -> None:
    import resource

    from pynetdicom import AE

    uid, film = next(iter(films.items()))
    dataset = dcmread(film)
    entity = AE(ae_title="PACS")
    entity.add_requested_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ImageFolder(tmp_path / "out") as images, receiver_in(images) as receiver:
        association = entity.associate("127.0.0.1", receiver.port, ae_title=OUR_TITLE)
        assert association.is_established
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            full = association.send_c_store(dataset)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert full.Status == 0xA700
        assert uid not in images
        # Space again, the same connection goes on.
        assert association.send_c_store(dataset).Status == 0x0000
        association.release()
        assert uid in images
    assert receiver.received.files == 1
    assert sum(receiver.received.refused.values()) == 1


def test_a_full_disk_ends_a_pull_with_the_true_reason(archive: Orthanc, films: dict[str, Path], tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageFailure, match="the disk is full; put it right and start again"):
            move_pull(archive, tmp_path / "out", Query(studies={study_uid(0): 1}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pulled, _ = move_pull(archive, tmp_path / "out", Query(studies={study_uid(0): 1}))
    assert (pulled.files, pulled.present) == (5, 0)


def test_a_receiver_for_a_pull_takes_only_what_was_asked_for(films: dict[str, Path], tmp_path: Path) -> None:
    (first, one), (second, other), *_ = films.items()
    with (
        ImageFolder(tmp_path / "out") as images,
        Receiver(
            images, title=OUR_TITLE, port=0, callers=["SCANNER"], address="127.0.0.1", only_expected=True
        ) as receiver,
    ):
        with receiver.expecting({first}):
            storescu(receiver, one, other)
            assert first in images
            assert second not in images
        storescu(receiver, one)
    assert dict(receiver.received.refused) == {"not asked for": 2}


def test_a_receiver_that_stops_ends_open_connections_and_frees_its_port(tmp_path: Path) -> None:
    with ImageFolder(tmp_path / "out") as images:
        receiver = receiver_in(images)
        receiver.start()
        with socket.create_connection(("127.0.0.1", receiver.port)):
            began = time.monotonic()
            receiver.stop(seconds=0.2)
            assert time.monotonic() - began < 10
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", receiver.port)) != 0


def test_a_port_in_use_nobody_to_listen_to_and_odd_titles_are_one_line(tmp_path: Path) -> None:
    with ImageFolder(tmp_path / "out") as images, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = Receiver(images, title=OUR_TITLE, port=port, callers=["PACS"], address="127.0.0.1")
        with pytest.raises(BadInput, match=f"port {port} cannot be listened on"):
            busy.start()
        with pytest.raises(BadInput, match="nobody is allowed to send"):
            Receiver(images, title=OUR_TITLE, port=0, callers=[])
        for title in ("", " ", "A" * 17, "GRÖSSE", "A\\B", "A\nB"):
            with pytest.raises(BadInput, match="AE title"):
                Receiver(images, title=title, port=0, callers=["PACS"])


def test_nothing_that_names_anybody_is_logged_or_printed(
    archive: Orthanc, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        move_pull(archive, tmp_path / "out", Query(studies={study_uid(0): 1}))
    told = caplog.text + "".join(capfd.readouterr())
    assert "PLANTED" not in told
    assert "1.2.826" not in told


@pytest.mark.shared
def test_transfer_syntaxes_and_withdrawn_classes_are_kept_as_they_are_sent(shared_data: Path, tmp_path: Path) -> None:
    names = ("015_US_ACMEPRO_color_px", "001_US_PHILIPS_no_pixel_spacing", "064_CR_FUJIPHO_RG3_JLSN")
    sent = {}
    with running(tmp_path) as orthanc:
        for name in names:
            file = shared_data / "dicom" / "files" / f"{name}.dcm"
            orthanc.upload(file)
            sent[str(dcmread(file).SOPInstanceUID)] = file
        pulled, _ = move_pull(orthanc, tmp_path / "out", Query(until=date(2030, 1, 1)))
    assert pulled.complete
    assert_same_images(tmp_path / "out" / "images", sent)
    syntaxes = {dcmread(file).file_meta.TransferSyntaxUID for file in (tmp_path / "out").rglob("*.dcm")}
    assert len(syntaxes) == 3
