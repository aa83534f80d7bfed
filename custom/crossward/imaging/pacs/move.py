"""An archive over the DICOM network service: C-FIND to search, C-MOVE to have it send images to our own receiver."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from pydicom import Dataset
from pynetdicom import AE, Association, evt
from pynetdicom.sop_class import (
    StudyRootQueryRetrieveInformationModelFind,
    StudyRootQueryRetrieveInformationModelMove,
    Verification,
)

from crossward.federation.errors import BadInput, RunFailure
from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.query import FoundStudy, Instance
from crossward.imaging.pacs.store import Receiver, checked_title, without_delay
from crossward.imaging.pacs.trouble import FEW_ATTEMPTS, Lost, Passing, Retrying, Trouble

_PENDING = (0xFF00, 0xFF01)
_UNKNOWN_DESTINATION = 0xA801
_REJECTED_FOR_NOW = 0x02
# A longer list of UIDs does not fit what some archives take.
_UIDS_AT_ONCE = 50
# From the smallest to the largest thing that can be asked for.
_LEVELS = (("IMAGE", "SOPInstanceUID"), ("SERIES", "SeriesInstanceUID"), ("STUDY", "StudyInstanceUID"))
_SERVICES = (
    Verification,
    StudyRootQueryRetrieveInformationModelFind,
    StudyRootQueryRetrieveInformationModelMove,
)
_STUDY_KEYS = ("StudyInstanceUID", "StudyDate", "ModalitiesInStudy", "AccessionNumber", "NumberOfStudyRelatedInstances")


@dataclass(frozen=True)
class Peer:
    """An archive's AE title and address."""

    title: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Reads ``TITLE@host:port``."""
        title, _, address = text.rpartition("@")
        host, _, port = address.rpartition(":")
        if not title or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadInput(f"{text} does not name an archive; write it as TITLE@host:port, such as PACS@10.0.0.5:104")
        return cls(checked_title(title), host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.title}@{self.host}:{self.port}"


class MovingArchive:
    """Searches an archive, and has it send to a receiver that runs beside.

    Args:
        peer: the archive.
        receiver: whose title the archive must know, with this machine's address and the receiver's port.
        retrying: how to deal with what passes.
        connections: how many studies at a time.
        seconds: that the archive may be silent.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        receiver: Receiver,
        retrying: Retrying,
        connections: int = 1,
        seconds: float = 300.0,
    ) -> None:
        self.retrying = retrying
        self.connections = connections
        self._peer = peer
        self._receiver = receiver
        self._title = receiver.title
        self._seconds = seconds
        self._idle: list[Association] = []
        self._lock = threading.Lock()

    def studies(self, keys: Mapping[str, str]) -> list[FoundStudy]:
        """The studies that match.

        Raises:
            CrosswardError: the archive cannot be searched; says why and what to do.
        """
        try:
            answers = self._find("STUDY", {**dict.fromkeys(_STUDY_KEYS, ""), **keys})
        except Passing as error:
            raise RunFailure(str(error)) from None
        return [
            FoundStudy(
                uid=_text(answer, "StudyInstanceUID"),
                date=_text(answer, "StudyDate"),
                modalities=_texts(answer, "ModalitiesInStudy"),
                accession=_text(answer, "AccessionNumber"),
                instances=_number(answer, "NumberOfStudyRelatedInstances"),
            )
            for answer in answers
        ]

    def instances(self, study: str) -> list[Instance]:
        """The files of a study, series by series, as archives without relational queries need it.

        Raises:
            Lost: the archive does not list them.
        """
        within = {"StudyInstanceUID": study}
        listed = []
        try:
            found = self._find("SERIES", {**within, "SeriesInstanceUID": ""})
            # An archive may list a series twice, under two patients.
            for uid in dict.fromkeys(_text(series, "SeriesInstanceUID") for series in found):
                images = self._find("IMAGE", {**within, "SeriesInstanceUID": uid, "SOPInstanceUID": ""})
                listed += [Instance(study, uid, _text(image, "SOPInstanceUID")) for image in images]
        except Passing as error:
            self._still_there()
            raise Lost(error.trouble) from None
        return listed

    def fetch(
        self, listed: Sequence[Instance], images: ImageFolder, arrived: Callable[[int], None]
    ) -> dict[str, Trouble]:
        """Has the images sent that are not there, compares with what came, and asks again for what did not.

        Args:
            listed: all images of a study.
            images: where the receiver puts them.
            arrived: told the bytes of each that came.

        Returns:
            The UIDs of those that did not come, with the reason.
        """
        missing = {instance.sop for instance in listed if instance.sop not in images}

        def tally() -> None:
            self.retrying.check()
            if self._receiver.failure:
                raise self._receiver.failure
            for uid in [uid for uid in missing if uid in images]:
                missing.remove(uid)
                arrived(images.path(uid).stat().st_size)

        def attempt() -> None:
            for keys in _requests(listed, missing):
                self._move(keys, tally)
            if missing:
                raise Passing(Trouble.NOT_DELIVERED.value, attempts=FEW_ATTEMPTS)

        try:
            with self._receiver.expecting(set(missing)):
                self.retrying(attempt)
        except Passing as error:
            self._still_there()
            return dict.fromkeys(missing, error.trouble)
        return {}

    def close(self) -> None:
        while association := self._kept():
            association.release()

    def __enter__(self) -> MovingArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, level: str, keys: Mapping[str, str]) -> list[Dataset]:
        return self.retrying(partial(self._find_once, level, keys))

    def _find_once(self, level: str, keys: Mapping[str, str]) -> list[Dataset]:
        found: list[Dataset] = []
        model = StudyRootQueryRetrieveInformationModelFind
        with self._association() as association:
            for answer, identifier in association.send_c_find(_identifier(level, keys), model):
                status = self._status(answer)
                if status in _PENDING and identifier is not None:
                    found.append(identifier)
                elif status != 0:
                    raise Passing(
                        f"{self._peer}: answered a search with status 0x{status:04X}; ask those who run the archive",
                        attempts=FEW_ATTEMPTS,
                    )
        if not all(_text(answer, dict(_LEVELS)[level]) for answer in found):
            raise Passing(f"{self._peer}: answered a search without UIDs; ask those who run it", attempts=FEW_ATTEMPTS)
        return found

    def _move(self, keys: Mapping[str, str], tally: Callable[[], None]) -> None:
        """Has the archive send what the keys name; images that it fails to send are found by comparing."""
        level = next(level for level, key in _LEVELS if key in keys)
        model = StudyRootQueryRetrieveInformationModelMove
        try:
            with self._association() as association:
                for answer, _ in association.send_c_move(_identifier(level, keys), self._title, model):
                    if self._status(answer) == _UNKNOWN_DESTINATION:
                        raise BadInput(
                            f"{self._peer}: does not know where {self._title} is; have it added there with this "
                            "machine's address and --port"
                        )
                    tally()
        finally:
            tally()

    def _still_there(self) -> None:
        """Ends the pull where not one image but the whole archive is out of reach."""
        try:
            self.retrying(self._echo)
        except Passing as error:
            raise RunFailure(str(error)) from None

    def _echo(self) -> None:
        with self._association() as association:
            self._status(association.send_c_echo())

    def _status(self, answer: Dataset) -> int:
        if "Status" not in answer:
            raise Passing(f"{self._peer}: broke the connection off; check the archive, then start again to go on")
        return int(answer.Status)

    @contextmanager
    def _association(self) -> Iterator[Association]:
        """A connection to the archive; it is kept for the next question where nothing went wrong."""
        association = self._kept() or self._new()
        try:
            yield association
        except BaseException:
            association.abort()
            raise
        with self._lock:
            self._idle.append(association)

    def _kept(self) -> Association | None:
        with self._lock:
            while self._idle:
                if (association := self._idle.pop()).is_established:
                    return association
        return None

    def _new(self) -> Association:
        entity = AE(ae_title=self._title)
        for service in _SERVICES:
            entity.add_requested_context(service)
        entity.connection_timeout = entity.acse_timeout = min(10.0, self._seconds)
        entity.dimse_timeout = entity.network_timeout = self._seconds
        at_once = [(evt.EVT_CONN_OPEN, without_delay)]
        association = entity.associate(
            self._peer.host, self._peer.port, ae_title=self._peer.title, evt_handlers=at_once
        )
        if not association.is_established:
            raise self._refusal(association)
        if len(association.accepted_contexts) < len(_SERVICES):
            association.release()
            raise BadInput(f"{self._peer}: does not offer C-FIND and C-MOVE to us; ask those who run the archive")
        return association

    def _refusal(self, association: Association) -> Passing | BadInput:
        answer: Any = association.acceptor.primitive
        if association.is_rejected and answer is not None and answer.result != _REJECTED_FOR_NOW:
            return BadInput(
                f"{self._peer}: refuses the connection; check its AE title, and that it knows ours ({self._title})"
            )
        return Passing(f"{self._peer}: does not answer; check the address and the archive, then start again to go on")


def _requests(listed: Sequence[Instance], missing: set[str]) -> Iterator[dict[str, str]]:
    """The fewest and largest requests for what is missing that name nothing which is there."""
    if not missing:
        return
    study = {"StudyInstanceUID": listed[0].study}
    if all(instance.sop in missing for instance in listed):
        yield study
        return
    by_series: dict[str, list[str]] = defaultdict(list)
    for instance in listed:
        by_series[instance.series].append(instance.sop)
    for series, uids in by_series.items():
        within = {**study, "SeriesInstanceUID": series}
        wanted = [uid for uid in uids if uid in missing]
        if len(wanted) == len(uids):
            yield within
            continue
        for first in range(0, len(wanted), _UIDS_AT_ONCE):
            yield {**within, "SOPInstanceUID": "\\".join(wanted[first : first + _UIDS_AT_ONCE])}


def _identifier(level: str, keys: Mapping[str, str]) -> Dataset:
    dataset = Dataset()
    dataset.QueryRetrieveLevel = level
    for keyword, value in keys.items():
        setattr(dataset, keyword, value.split("\\") if "\\" in value else value)
    return dataset


def _texts(answer: Dataset, keyword: str) -> tuple[str, ...]:
    value = answer.get(keyword)
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return tuple(text for one in values if one is not None and (text := str(one).strip(" \0")))


def _text(answer: Dataset, keyword: str) -> str:
    return next(iter(_texts(answer, keyword)), "")


def _number(answer: Dataset, keyword: str) -> int | None:
    text = _text(answer, keyword)
    return int(text) if text.isdecimal() else None
