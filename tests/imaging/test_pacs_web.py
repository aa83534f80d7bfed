from __future__ import annotations

import json
import logging
import os
import re
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydicom import dcmread
from tests.imaging.orthanc import LOGIN, Orthanc, assert_same_images, killing, phantom_studies, running, study_uid

from crossward.federation.errors import BadInput, RunFailure, StorageFailure
from crossward.imaging.pacs.access import Access, read_access
from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.pull import Pulled, pull
from crossward.imaging.pacs.query import Query
from crossward.imaging.pacs.trouble import Patience, Retrying, Trouble
from crossward.imaging.pacs.web import DicomWeb

ALL = Query(since=date(2024, 1, 1), until=date(2024, 1, 31))
QUICK = Patience(attempts=5, first=0.02, longest=0.1)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return phantom_studies(tmp_path_factory.mktemp("films"), 40)


def web_pull(
    url: str,
    out: Path,
    query: Query = ALL,
    *,
    login: str = LOGIN,
    access: Access | None = None,
    patience: Patience = QUICK,
    connections: int = 4,
    progress: Callable[[str, int, int], None] | None = None,
) -> Pulled:
    access = access or read_access(environment={"CROSSWARD_PACS_LOGIN": login})
    source = DicomWeb(url, access=access, retrying=Retrying(patience), connections=connections, seconds=20)
    with ImageFolder(out) as images:
        return pull(source, query, images, progress=progress)


def test_every_file_comes_once_as_it_was_uploaded_and_not_again(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    first = web_pull(archive.url, tmp_path / "out")
    assert (first.studies, first.files, first.present, first.complete) == (4, 40, 0, True)
    assert first.bytes == sum(film.stat().st_size for film in films.values())
    assert_same_images(tmp_path / "out" / "images", films)
    originals = {film.read_bytes() for film in films.values()}
    assert {file.read_bytes() for file in (tmp_path / "out" / "images").rglob("*.dcm")} == originals
    second = web_pull(archive.url, tmp_path / "out")
    assert (second.files, second.present) == (0, 40)
    removed = sorted((tmp_path / "out" / "images").rglob("*.dcm"))[:3]
    for file in removed:
        file.unlink()
    third = web_pull(archive.url, tmp_path / "out")
    assert (third.files, third.present) == (3, 37)


def test_the_folder_is_private_and_names_nobody(archive: Orthanc, tmp_path: Path) -> None:
    web_pull(archive.url, tmp_path / "out", Query(studies={study_uid(0): 1}))
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
        assert "PLANTED" not in path.name
        assert "1.2.826" not in path.name
    assert "PLANTED" not in (tmp_path / "out" / "pull.jsonl").read_text()


@pytest.mark.parametrize(
    ("query", "studies"),
    [
        (Query(since=date(2024, 1, 3)), {2, 3}),
        (Query(since=date(2024, 1, 2), until=date(2024, 1, 3)), {1, 2}),
        (Query(until=date(2024, 1, 3), modalities=("DX",)), {0, 1, 2}),
        (Query(modalities=("CT",)), set()),
        (Query(studies={study_uid(3): 1}, accessions={"PLANTED-1": 4}), {1, 3}),
        (Query(accessions={"PLANTED-0": 1, "PLANTED-2": 2}, since=date(2024, 1, 2)), {2}),
    ],
)
def test_the_question_decides_which_studies_come(
    archive: Orthanc, tmp_path: Path, query: Query, studies: set[int]
) -> None:
    pulled = web_pull(archive.url, tmp_path / "out", query)
    lines = (tmp_path / "out" / "pull.jsonl").read_text().splitlines() if studies else []
    assert {json.loads(line)["study"] for line in lines} == {study_uid(number) for number in studies}
    assert (pulled.studies, pulled.files) == (len(studies), 10 * len(studies))


def test_listed_studies_that_are_not_there_are_told_by_their_line(archive: Orthanc, tmp_path: Path) -> None:
    query = Query(studies={"1.2.3.4": 7, study_uid(0): 8}, accessions={"planted-0": 3})
    pulled = web_pull(archive.url, tmp_path / "out", query)
    # Orthanc compares accession numbers without regard to case; the answer is not the one that was asked for.
    assert pulled.not_found == {"accessions": [3], "studies": [7]}
    assert (pulled.files, pulled.unasked, pulled.complete) == (10, 1, False)


def test_an_archive_that_is_killed_and_comes_back_costs_only_retries(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    patience = Patience(attempts=10, first=0.1, longest=0.5)
    progress = killing(archive, 20, restart=True)
    pulled = web_pull(archive.url, tmp_path / "out", patience=patience, progress=progress)
    assert pulled.complete
    assert pulled.files == 40
    assert pulled.retries >= 1
    assert_same_images(tmp_path / "out" / "images", films)


def test_an_archive_that_stays_away_ends_the_pull_and_the_next_goes_on(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunFailure, match=rf"^127\.0\.0\.1:{archive.http_port}: .* start again to go on$"):
        web_pull(archive.url, tmp_path / "out", progress=killing(archive, 15, restart=False))
    there = len(list((tmp_path / "out" / "images").rglob("*.dcm")))
    assert 15 <= there < 40
    archive.start()
    pulled = web_pull(archive.url, tmp_path / "out")
    assert (pulled.files, pulled.present, pulled.complete) == (40 - there, there, True)
    assert_same_images(tmp_path / "out" / "images", films)


def test_images_that_go_between_list_and_fetch_are_told_and_the_rest_comes(
    films: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path) as orthanc:
        names = {uid: orthanc.upload(film) for uid, film in list(films.items())[:16]}
        doomed = list(names)[:16:4][:2]

        def progress(what: str, done: int, total: int) -> None:
            if what == "files" and total and names.keys() >= set(doomed):
                for uid in doomed:
                    orthanc.ask(f"/instances/{names.pop(uid)}", method="DELETE")

        pulled = web_pull(orthanc.url, tmp_path / "out", connections=1, progress=progress)
        assert (pulled.studies, pulled.files, dict(pulled.missing)) == (4, 14, {Trouble.GONE: 2})
        rows = [json.loads(line) for line in (tmp_path / "out" / "pull.jsonl").read_text().splitlines()]
        missing = {uid: reason for row in rows for uid, reason in row["missing"].items()}
        assert missing == dict.fromkeys(doomed, "is listed, but no longer there")
        # Put back, just these two come.
        for uid in doomed:
            orthanc.upload(films[uid])
        again = web_pull(orthanc.url, tmp_path / "out")
        assert (again.files, again.present, again.complete) == (2, 14, True)


def test_a_study_whose_files_the_archive_lost_is_told_and_the_others_come(
    films: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path) as orthanc:
        names = [orthanc.upload(film) for film in list(films.values())[:8]]
        orthanc.attachment(names[0]).unlink()
        # What was uploaded is still in its memory until it starts anew.
        orthanc.kill()
        orthanc.start()
        pulled = web_pull(orthanc.url, tmp_path / "out")
        assert (pulled.studies, pulled.files, dict(pulled.missing)) == (4, 6, {Trouble.NOT_DELIVERED: 1})
        orthanc.ask(f"/instances/{names[0]}", method="DELETE")
        orthanc.upload(next(iter(films.values())))
        again = web_pull(orthanc.url, tmp_path / "out")
        assert (again.files, again.present, again.complete) == (2, 6, True)


@pytest.mark.parametrize(
    ("login", "line"),
    [("tester:wrong", "the login is not accepted"), ("", "the login is not accepted")],
)
def test_a_wrong_login_is_one_line(archive: Orthanc, tmp_path: Path, login: str, line: str) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        web_pull(archive.url, tmp_path / "out", login=login)
    assert "wrong" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_host_port_or_path_is_told_at_once(archive: Orthanc, tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match=r"no-such-archive\.invalid: cannot be reached"):
        web_pull("http://no-such-archive.invalid/dicom-web", tmp_path / "a", access=Access())
    with pytest.raises(RunFailure, match=r"127\.0\.0\.1:1: cannot be reached"):
        web_pull("http://127.0.0.1:1/dicom-web", tmp_path / "b")
    with pytest.raises(BadInput, match="check --url"):
        web_pull(f"{archive.root}/dicom-wrong", tmp_path / "c")


@pytest.mark.parametrize(
    "url",
    ["archive.example", "ftp://archive.example", "https://planted:secret@archive.example", "https://a.example/?x=1"],
)
def test_an_address_with_more_than_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        DicomWeb(url, access=Access(), retrying=Retrying(QUICK))
    assert "planted" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_login_does_not_go_over_plain_http_to_another_machine() -> None:
    access = Access(authorization="Bearer planted-token")
    with pytest.raises(BadInput, match="use https"):
        DicomWeb("http://archive.example/dicom-web", access=access, retrying=Retrying(QUICK))
    DicomWeb("http://archive.example/dicom-web", access=access, retrying=Retrying(QUICK), allow_http=True)
    assert "planted-token" not in repr(access)


def test_a_full_disk_ends_the_pull_and_what_came_is_whole(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    smallest = min(film.stat().st_size for film in films.values())
    resource.setrlimit(resource.RLIMIT_FSIZE, (smallest - 1000, limits[1]))
    try:
        with pytest.raises(StorageFailure, match="the disk is full") as caught:
            web_pull(archive.url, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not re.search(r"[0-9a-f]{32}", str(caught.value))
    assert [file for file in (tmp_path / "out" / "images").rglob("*") if file.is_file()] == []
    assert web_pull(archive.url, tmp_path / "out").files == 40


def test_nothing_that_names_anybody_is_logged_or_printed(
    archive: Orthanc, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        web_pull(archive.url, tmp_path / "out", Query(studies={study_uid(0): 1}, accessions={"PLANTED-1": 1}))
    told = caplog.text + "".join(capfd.readouterr())
    assert "PLANTED" not in told
    assert "1.2.826" not in told
    assert logging.getLogger("urllib3").level == logging.NOTSET


def write_certificates(folder: Path) -> None:
    """An authority, a server certificate for 127.0.0.1 and a client certificate, as PEM."""
    import ipaddress

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])

    def write(name: str, key: ec.EllipticCurvePrivateKey, subject: x509.Name, *, is_authority: bool) -> None:
        now = datetime.now()
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(host, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        kind = serialization.PrivateFormat.PKCS8
        secret = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
        (folder / f"{name}.pem").write_bytes(pem)
        (folder / f"{name}.key").write_bytes(secret)
        (folder / f"{name}.both").write_bytes(secret + pem)

    write("authority", authority_key, authority, is_authority=True)
    for name in ("server", "client"):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        write(name, ec.generate_private_key(ec.SECP256R1()), subject, is_authority=False)


Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def pretending(answer: Callable[[str], Answer], *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """An archive that answers whatever the test says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path)
            self.send_response(status)
            headers = {"Content-Length": str(len(body)), **headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that went away is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def found(**tags: str) -> dict[str, object]:
    return {tag[1:]: {"vr": "UI", "Value": [value]} for tag, value in tags.items()}


def one_study(fetched: Answer, uid: str) -> Callable[[str], Answer]:
    """A study with one file, whose retrieval gives the answer."""

    def answer(path: str) -> Answer:
        if "offset=0" not in path and "?" in path:
            return 204, {}, b""
        if path.startswith("/studies?"):
            return 200, {}, json.dumps([found(t0020000D="1.2.3")]).encode()
        if path.startswith("/studies/1.2.3/instances?"):
            return 200, {}, json.dumps([found(t0020000E="1.2.3.4", t00080018=uid)]).encode()
        return fetched

    return answer


def part(body: bytes) -> Answer:
    text = b"--edge\r\nContent-Type: application/dicom\r\n\r\n" + body + b"\r\n--edge--"
    return 200, {"Content-Type": 'multipart/related; type="application/dicom"; boundary="edge"'}, text


ONE = Query(studies={"1.2.3": 1})


def test_what_comes_is_held_against_what_was_asked_for(films: dict[str, Path], tmp_path: Path) -> None:
    (uid, film), (_, other), *_ = films.items()
    good = film.read_bytes()
    whole = part(good)
    cases: dict[str, tuple[Answer, Trouble | None]] = {
        "right": (whole, None),
        "without multipart": ((200, {"Content-Type": "application/dicom"}, good), None),
        "other": (part(other.read_bytes()), Trouble.OTHER),
        "cut": (part(good[:-700]), Trouble.DAMAGED),
        "no end": ((200, whole[1], whole[2][:-10]), Trouble.DAMAGED),
        "page": ((200, {"Content-Type": "text/html"}, b"<html>log in</html>"), Trouble.NOT_DICOM),
        "text as dicom": (part(b"log in" * 100), Trouble.NOT_DICOM),
        "two": (part(good + b"\r\n--edge\r\nContent-Type: application/dicom\r\n\r\n" + good), Trouble.OTHER),
        "gone": ((404, {}, b""), Trouble.GONE),
        "forbidden": ((403, {}, b""), Trouble.FORBIDDEN),
        "broken": ((500, {}, b"PLANTED^NAME"), Trouble.NOT_DELIVERED),
        "not acceptable": ((406, {}, b""), Trouble.NOT_DELIVERED),
    }
    for name, (fetched, trouble) in cases.items():
        with pretending(one_study(fetched, uid)) as url:
            pulled = web_pull(url, tmp_path / name, ONE, access=Access())
        assert dict(pulled.missing) == ({trouble: 1} if trouble else {}), name
        kept = [file.read_bytes() for file in (tmp_path / name / "images").rglob("*") if file.is_file()]
        assert kept == ([] if trouble else [good]), name


def test_a_busy_archive_is_asked_again_as_late_as_it_wants(films: dict[str, Path], tmp_path: Path) -> None:
    import time

    uid, film = next(iter(films.items()))
    times: list[float] = []

    def answer(path: str) -> Answer:
        if "/series/" in path:
            times.append(time.monotonic())
            if len(times) < 3:
                return 503, {"Retry-After": "1" if len(times) == 1 else "soon"}, b""
        return one_study(part(film.read_bytes()), uid)(path)

    with pretending(answer) as url:
        pulled = web_pull(url, tmp_path / "out", ONE, access=Access())
    assert (pulled.files, pulled.retries) == (1, 2)
    assert times[1] - times[0] >= 1.0
    assert times[2] - times[1] < 1.0


def test_a_redirection_is_not_followed_with_the_login(tmp_path: Path) -> None:
    seen: list[str] = []

    def elsewhere(path: str) -> Answer:
        seen.append(path)
        return 200, {}, b"[]"

    with (
        pretending(elsewhere) as other,
        pretending(lambda path: (302, {"Location": other}, b"")) as url,
        pytest.raises(BadInput, match="answered 302, a redirection"),
    ):
        web_pull(url, tmp_path / "out", ONE)
    assert seen == []


@pytest.mark.parametrize(("cap", "ignores_offset", "warns"), [(3, False, True), (50, False, False), (50, True, False)])
def test_all_pages_of_a_search_are_read(tmp_path: Path, cap: int, ignores_offset: bool, warns: bool) -> None:
    uids = [f"1.2.3.{number}" for number in range(11)]

    def answer(path: str) -> Answer:
        offset = 0 if ignores_offset else int(re.search(r"offset=(\d+)", path)[1])  # type: ignore[index]
        items = [found(t0020000D=uid) for uid in uids[offset : offset + cap]] if path.startswith("/studies?") else []
        headers = {"Warning": '299 archive "there are more"'} if warns and offset + cap < len(uids) else {}
        return 200, headers, json.dumps(items).encode()

    with pretending(answer) as url:
        pulled = web_pull(url, tmp_path / "out", access=Access())
    assert pulled.studies == 11


def test_tls_wants_the_archives_authority_and_our_certificate(films: dict[str, Path], tmp_path: Path) -> None:
    write_certificates(tmp_path)
    wanting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "authority.pem")
    wanting.load_cert_chain(tmp_path / "server.both")
    wanting.verify_mode = ssl.CERT_REQUIRED
    uid, film = next(iter(films.items()))
    authority = tmp_path / "authority.pem"
    with pretending(one_study(part(film.read_bytes()), uid), tls=wanting) as url:
        with pytest.raises(BadInput, match="certificate is not trusted; give its authority with --ca"):
            web_pull(url, tmp_path / "out", ONE, access=read_access(environment={}))
        with pytest.raises(RunFailure, match=r"^127\.0\.0\.1:\d+: "):
            web_pull(url, tmp_path / "out", ONE, access=read_access(ca_file=authority, environment={}))
        certificate, key = tmp_path / "client.pem", tmp_path / "client.key"
        access = read_access(ca_file=authority, certificate=certificate, key=key, environment={})
        assert web_pull(url, tmp_path / "out", ONE, access=access).files == 1


def test_a_study_under_two_patients_hides_no_other_and_is_pulled_once(films: dict[str, Path], tmp_path: Path) -> None:
    with running(tmp_path) as orthanc:
        uids = {}
        for number, (uid, film) in enumerate(list(films.items())[:8]):
            dataset = dcmread(film)
            dataset.PatientID = f"PLANTED-{number}"
            dataset.save_as(tmp_path / f"{number}.dcm")
            orthanc.upload(tmp_path / f"{number}.dcm")
            uids[uid] = tmp_path / f"{number}.dcm"
        assert orthanc.ask("/statistics")["CountStudies"] == 8
        pulled = web_pull(orthanc.url, tmp_path / "out")
        assert (pulled.studies, pulled.files, pulled.complete) == (4, 8, True)
        assert_same_images(tmp_path / "out" / "images", uids)
        assert web_pull(orthanc.url, tmp_path / "out").present == 8


def test_rows_that_repeat_a_study_do_not_end_the_search_early(tmp_path: Path) -> None:
    rows = [found(t0020000D="1.2.1", t00100020=str(number)) for number in range(9)] + [found(t0020000D="1.2.2")]

    def answer(path: str) -> Answer:
        offset = int(re.search(r"offset=(\d+)", path)[1])  # type: ignore[index]
        page = rows[offset : offset + 3] if path.startswith("/studies?") else []
        return 200, {}, json.dumps(page).encode()

    with pretending(answer) as url:
        assert web_pull(url, tmp_path / "out", access=Access()).studies == 2


def test_a_search_that_an_archive_cuts_short_is_refused(tmp_path: Path) -> None:
    items = json.dumps([found(t0020000D=f"1.2.3.{number}") for number in range(5)]).encode()
    answer = (200, {"Warning": '299 archive "there are more"'}, items)
    with pretending(lambda path: answer) as url, pytest.raises(BadInput, match="no more than 5 results"):
        web_pull(url, tmp_path / "out", access=Access())


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]", b'[{"00100010": {}}]', b'[{"0020000D": 5}]'])
def test_a_search_that_answers_nonsense_is_one_line(tmp_path: Path, body: bytes) -> None:
    with pretending(lambda path: (200, {}, body)) as url, pytest.raises(RunFailure, match=r"127\.0\.0\.1.*--url"):
        web_pull(url, tmp_path / "out", access=Access())


def test_an_archive_that_counts_more_than_it_lists_is_not_believed(films: dict[str, Path], tmp_path: Path) -> None:
    uid, film = next(iter(films.items()))

    def answer(path: str) -> Answer:
        if path.startswith("/studies?") and "offset=0" in path:
            return 200, {}, json.dumps([found(t0020000D="1.2.3", t00201208="3")]).encode()
        return one_study(part(film.read_bytes()), uid)(path)

    with pretending(answer) as url:
        for files in (1, 0):
            pulled = web_pull(url, tmp_path / "out", ONE, access=Access())
            assert (pulled.files, dict(pulled.missing)) == (files, {Trouble.SHORT_LIST: 2})


@pytest.mark.shared
def test_files_of_many_makers_come_byte_for_byte(shared_data: Path, tmp_path: Path) -> None:
    with running(tmp_path) as orthanc:
        taken = set()
        for file in sorted((shared_data / "dicom" / "files").iterdir())[:25]:
            try:
                orthanc.upload(file)
            except OSError:
                continue
            taken.add(file.read_bytes())
        pulled = web_pull(orthanc.url, tmp_path / "out", Query(until=date(2030, 1, 1)))
    assert pulled.complete
    assert {file.read_bytes() for file in (tmp_path / "out" / "images").rglob("*.dcm")} == taken
    assert len(taken) > 15
    assert os.stat(tmp_path / "out").st_mode & 0o077 == 0
