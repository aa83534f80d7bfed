"""A real archive for tests: Orthanc on loopback ports, with a login, DICOMweb and storage of its own."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pydicom import dcmread

from crossward.imaging.phantom import write_hospitals

LOGIN = "tester:planted-password"
TITLE = "ORTHANC"
OUR_TITLE = "CROSSWARD"
PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
STUDIES = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Orthanc:
    """Starts, kills and fills one archive; what it stores outlives a kill."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.program = shutil.which("Orthanc", path="/usr/sbin:/usr/bin:/usr/local/bin:/usr/local/sbin")
        if self.program is None or not PLUGIN.exists():
            pytest.skip("Orthanc with its DICOMweb plugin is not installed (see tests/debian)")
        self.folder = folder
        self.storage = folder / "storage"
        self.http_port, self.dicom_port, self.our_port = free_port(), free_port(), free_port()
        self.root = f"http://127.0.0.1:{self.http_port}"
        self.url = f"{self.root}/dicom-web"
        self.config = folder / "orthanc.json"
        self.config.write_text(
            json.dumps(
                {
                    "StorageDirectory": str(self.storage),
                    "IndexDirectory": str(self.storage),
                    "Plugins": [str(PLUGIN)],
                    "HttpPort": self.http_port,
                    "DicomPort": self.dicom_port,
                    "DicomAet": TITLE,
                    "DicomCheckCalledAet": True,
                    "RemoteAccessAllowed": False,
                    "AuthenticationEnabled": True,
                    "RegisteredUsers": dict([LOGIN.split(":")]),
                    "DicomModalities": {"us": [OUR_TITLE, "127.0.0.1", self.our_port]},
                    **settings,
                }
            )
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "orthanc.log").open("ab") as log:
            self.process = subprocess.Popen([str(self.program), str(self.config)], stdout=log, stderr=log)
        end = time.monotonic() + 20
        for port in (self.http_port, self.dicom_port):
            while True:
                assert time.monotonic() < end, "Orthanc did not start; see its log"
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def ask(self, path: str, body: bytes | None = None, *, method: str | None = None) -> Any:
        login = base64.b64encode(LOGIN.encode()).decode()
        request = Request(f"{self.root}{path}", data=body, headers={"Authorization": f"Basic {login}"}, method=method)
        with urlopen(request) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def upload(self, file: Path) -> str:
        """Orthanc's own name for the instance."""
        return str(self.ask("/instances", file.read_bytes())["ID"])

    def attachment(self, instance: str) -> Path:
        """The file in the archive's storage that holds the instance."""
        uuid = self.ask(f"/instances/{instance}/attachments/dicom/info")["Uuid"]
        return self.storage / uuid[:2] / uuid[2:4] / uuid


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Orthanc]:
    archive = Orthanc(folder, **settings)
    archive.start()
    try:
        yield archive
    finally:
        archive.kill()


def killing(archive: Orthanc, after: int, *, restart: bool) -> Callable[[str, int, int], None]:
    """A progress that kills the archive after so many files, and starts it again where asked to."""
    state = {"killed": False}

    def progress(what: str, done: int, total: int) -> None:
        if what == "files" and done >= after and not state["killed"]:
            state["killed"] = True
            archive.kill()
            if restart:
                threading.Timer(0.3, archive.start).start()

    return progress


def phantom_studies(folder: Path, count: int) -> dict[str, Path]:
    """Phantom films as 4 studies of 2 series, on 4 days, each with an accession number; by SOP instance UID."""
    write_hospitals(folder / "phantoms", sites=2, patients=20)
    films = sorted((folder / "phantoms").rglob("*.dcm"))[:count]
    assert len(films) == count
    files = {}
    for number, film in enumerate(films):
        dataset = dcmread(film)
        study = number % STUDIES
        dataset.StudyInstanceUID = study_uid(study)
        dataset.SeriesInstanceUID = f"{study_uid(study)}.{number // STUDIES % 2}"
        dataset.StudyDate = f"2024010{study + 1}"
        dataset.AccessionNumber = f"PLANTED-{study}"
        dataset.PatientName, dataset.PatientID = "PLANTED^NAME", f"PLANTED-ID-{study}"
        dataset.save_as(folder / f"{number}.dcm")
        files[str(dataset.SOPInstanceUID)] = folder / f"{number}.dcm"
    return files


def study_uid(number: int) -> str:
    return f"1.2.826.0.1.3680043.10.1.{number + 1}"


def assert_same_images(kept: Path, originals: dict[str, Path]) -> None:
    """Every original is there once, with the same elements and the same pixel bytes, and nothing else is."""
    files = [file for file in kept.rglob("*") if file.is_file()]
    found = {}
    for file in files:
        dataset = dcmread(file)
        found[str(dataset.SOPInstanceUID)] = dataset
    assert len(files) == len(found)
    assert found.keys() == originals.keys()
    for uid, original in originals.items():
        sent = dcmread(original)
        assert found[uid].file_meta.TransferSyntaxUID == sent.file_meta.TransferSyntaxUID
        assert found[uid].get("PixelData") == sent.get("PixelData")
        assert found[uid] == sent
