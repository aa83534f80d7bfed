"""An archive over DICOMweb: QIDO-RS to search, WADO-RS to fetch.

Files are fetched one by one and streamed to disk as the archive keeps them, without a change of transfer syntax.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from crossward.federation.errors import BadInput, RunFailure
from crossward.imaging.pacs.access import Access
from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.multipart import Malformed, Multipart, content_type
from crossward.imaging.pacs.query import FoundStudy, Instance
from crossward.imaging.pacs.trouble import FEW_ATTEMPTS, Lost, Passing, Retrying, Trouble

_PAGE = 200
_PIECE = 256 * 1024
_LONGEST_ANSWER = 64 * 1024 * 1024
_JSON = "application/dicom+json"
# Without the star an archive has to decompress what it keeps compressed, and fails where it cannot.
_DICOM = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_STUDY_UID, _SERIES_UID, _SOP_UID = "0020000D", "0020000E", "00080018"
_DATE, _ACCESSION, _MODALITIES, _INSTANCES = "00080020", "00080050", "00080061", "00201208"
_LOST = {404: Trouble.GONE, 410: Trouble.GONE, 403: Trouble.FORBIDDEN}
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})

Item = Mapping[str, Any]


class DicomWeb:
    """Searches and fetches; any number of threads may use it.

    Args:
        url: the root of the DICOMweb service, as in https://archive.example/dicom-web.
        access: login and certificates.
        retrying: how to deal with what passes.
        connections: how many at a time.
        seconds: that the archive may be silent.
        allow_http: send a login over plain http to another machine.

    Raises:
        BadInput: the address cannot be used; what is in it is not repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        access: Access,
        retrying: Retrying,
        connections: int = 4,
        seconds: float = 60.0,
        allow_http: bool = False,
    ) -> None:
        self.retrying = retrying
        self.connections = connections
        self._root, self._host = _checked(url, secret=access.authorization is not None, allow_http=allow_http)
        self._headers = {"Authorization": access.authorization} if access.authorization else {}
        self._pool = urllib3.PoolManager(
            maxsize=connections, timeout=urllib3.Timeout(total=None, connect=10.0, read=seconds), ssl_context=access.tls
        )

    def studies(self, keys: Mapping[str, str]) -> list[FoundStudy]:
        """The studies that match.

        Raises:
            CrosswardError: the archive cannot be searched; says why and what to do.
        """
        fields = {**keys, "includefield": "NumberOfStudyRelatedInstances,ModalitiesInStudy"}
        try:
            return [
                FoundStudy(
                    uid=_text(item, _STUDY_UID),
                    date=_text(item, _DATE),
                    modalities=_texts(item, _MODALITIES),
                    accession=_text(item, _ACCESSION),
                    instances=_number(item, _INSTANCES),
                )
                for item in self._pages("studies", fields, _STUDY_UID)
            ]
        except Passing as error:
            raise RunFailure(str(error)) from None
        except Lost:
            raise BadInput(
                f"{self._host}: does not let this be searched, or has no DICOMweb there; check --url and the login"
            ) from None

    def instances(self, study: str) -> list[Instance]:
        """The files of a study.

        Raises:
            Lost: the archive does not list them.
        """
        try:
            items = self._pages(f"studies/{quote(study, safe='')}/instances", {}, _SOP_UID)
            return [Instance(study, _text(item, _SERIES_UID), _text(item, _SOP_UID)) for item in items]
        except Passing as error:
            self._still_there()
            raise Lost(error.trouble) from None

    def fetch(
        self, listed: Sequence[Instance], images: ImageFolder, arrived: Callable[[int], None]
    ) -> dict[str, Trouble]:
        """Fetches the files that are not there, one by one.

        Args:
            listed: all images of a study.
            images: where they go.
            arrived: told the bytes of each that came.

        Returns:
            The UIDs of those that did not come, with the reason.
        """
        lost = {}
        for instance in listed:
            if instance.sop in images:
                continue
            try:
                arrived(self.retrying(partial(self._file, instance, images)))
            except Lost as error:
                lost[instance.sop] = error.trouble
            except Passing as error:
                self._still_there()
                lost[instance.sop] = error.trouble
        return lost

    def _still_there(self) -> None:
        """Ends the pull where not one image but the whole archive is out of reach."""
        self.studies({"StudyInstanceUID": "0.0"})

    def _file(self, instance: Instance, images: ImageFolder) -> int:
        series = f"studies/{quote(instance.study, safe='')}/series/{quote(instance.series, safe='')}"
        with self._answer(f"{series}/instances/{quote(instance.sop, safe='')}", accept=_DICOM) as answer:
            try:
                return images.put(instance.sop, self._one_file(answer))[1]
            except Lost as error:
                # What came once may have been a proxy's page or another file's; that of a broken archive stays so.
                raise Passing(str(error), attempts=FEW_ATTEMPTS, trouble=error.trouble) from None

    def _one_file(self, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        """The file in an answer, which holds exactly one."""
        kind, boundary = content_type(answer.headers.get("Content-Type"))
        pieces = self._pieces(answer)
        if kind == "application/dicom":
            yield from pieces
            return
        try:
            for number, (part, body) in enumerate(Multipart(boundary, pieces)):
                if number or part != "application/dicom":
                    raise Lost(Trouble.OTHER if number else Trouble.NOT_DICOM)
                yield from body
            for _ in pieces:
                pass
        except Malformed:
            trouble = Trouble.DAMAGED if boundary else Trouble.NOT_DICOM
            raise Passing(trouble.value, attempts=FEW_ATTEMPTS, trouble=trouble) from None

    def _pages(self, path: str, fields: Mapping[str, str], key: str) -> Iterator[Item]:
        """Rows of a search, asked for until a page brings nothing new: archives have limits of their own.

        Rows are told apart by all that is in them: an archive may list a study twice, under two patients.
        """
        seen: set[str] = set()
        offset = 0
        while True:
            paging = {"limit": str(_PAGE), "offset": str(offset)}
            page, cut = self.retrying(partial(self._page, path, {**fields, **paging}))
            new = {row: item for item in page if (row := json.dumps(item, sort_keys=True)) not in seen}
            if not all(_text(item, key) for item in new.values()):
                raise Passing(f"{self._host}: answered a search without UIDs; is --url a DICOMweb service?")
            yield from new.values()
            seen |= new.keys()
            offset += len(page)
            if page and not new and cut:
                raise BadInput(f"{self._host}: lists no more than {len(seen)} results; ask for fewer days at a time")
            if not new:
                return

    def _page(self, path: str, fields: Mapping[str, str]) -> tuple[list[Item], bool]:
        with self._answer(path, accept=_JSON, fields=fields) as answer:
            if answer.status == 204:
                return [], False
            body = b""
            for piece in self._pieces(answer):
                body += piece
                if len(body) > _LONGEST_ANSWER:
                    raise BadInput(f"{self._host}: answered a search with more than can be taken; ask for fewer days")
            try:
                found = json.loads(body)
            except ValueError:
                found = None
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                line = f"{self._host}: answered a search with something else than DICOM JSON; is --url right?"
                raise Passing(line, attempts=FEW_ATTEMPTS)
            return found, answer.headers.get("Warning", "").startswith("299")

    @contextmanager
    def _answer(
        self, path: str, *, accept: str, fields: Mapping[str, str] | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """An answer whose body is not yet read; only one with success."""
        try:
            answer = self._pool.request(
                "GET",
                f"{self._root}/{path}",
                fields=fields,
                headers={**self._headers, "Accept": accept},
                preload_content=False,
                retries=False,
                redirect=False,
            )
        except HTTPError as error:
            raise self._unreachable(error) from None
        try:
            self._check_status(answer)
            yield answer
        finally:
            # An answer that was read to its end has given its connection back before this; any other is of no more use.
            answer.close()

    def _unreachable(self, error: HTTPError) -> Passing | BadInput:
        reason = error.args[-1] if error.args else None
        if isinstance(error, SSLError) and isinstance(reason, ssl.SSLCertVerificationError):
            return BadInput(f"{self._host}: its certificate is not trusted; give its authority with --ca")
        if isinstance(error, SSLError):
            return Passing(f"{self._host}: no secure connection; check https, --ca and --certificate")
        away = isinstance(error, NewConnectionError | ConnectTimeoutError)
        kind = "cannot be reached" if away else "broke the connection off"
        return Passing(f"{self._host}: {kind}; check the address and the archive, then start again to go on")

    def _check_status(self, answer: urllib3.BaseHTTPResponse) -> None:
        status = answer.status
        if status in (200, 204, 206):
            return
        if status == 401:
            raise BadInput(f"{self._host}: answered 401, the login is not accepted; check the login or token")
        if 300 <= status < 400:
            raise BadInput(f"{self._host}: answered {status}, a redirection; give the address it leads to with --url")
        if status in _LOST:
            raise Lost(_LOST[status])
        wait = answer.headers.get("Retry-After", "")
        raise Passing(
            f"{self._host}: answered {status} again and again; ask those who run the archive, then start again",
            attempts=FEW_ATTEMPTS if status not in _BUSY - {500} else None,
            wait=float(wait) if wait.isdecimal() else 0.0,
        )

    def _pieces(self, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            for piece in answer.stream(_PIECE):
                self.retrying.check()
                yield piece
        except HTTPError as error:
            raise self._unreachable(error) from None


def _checked(url: str, *, secret: bool, allow_http: bool) -> tuple[str, str]:
    """The address without a slash at its end, and its host for messages."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in ("http", "https"):
        raise BadInput("--url is not an http or https address; write it as https://archive.example/dicom-web")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadInput("--url may hold host, port and path only; logins go into a file (--login-file, --token-file)")
    if secret and parts.scheme == "http" and not allow_http and not _is_here(host):
        raise BadInput(
            f"{host}: a login over plain http can be read on the way; use https, or --allow-http if you must"
        )
    return url.rstrip("/"), f"{host}:{port}" if port else host


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _texts(item: Item, tag: str) -> tuple[str, ...]:
    values = item.get(tag, {}).get("Value") if isinstance(item.get(tag), dict) else None
    return tuple(str(value).strip() for value in values) if isinstance(values, list) else ()


def _text(item: Item, tag: str) -> str:
    return next(iter(_texts(item, tag)), "")


def _number(item: Item, tag: str) -> int | None:
    text = _text(item, tag)
    return int(text) if text.isdecimal() else None
