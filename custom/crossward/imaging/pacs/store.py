"""Receives images by C-STORE from archives and scanners that are on the list, as they send them."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pynetdicom import AE, ALL_TRANSFER_SYNTAXES, AllStoragePresentationContexts, evt, register_uid
from pynetdicom.dsutils import encode_file_meta
from pynetdicom.service_class import StorageServiceClass
from pynetdicom.sop_class import Verification

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.trouble import Lost, Trouble, quiet_libraries

SUCCESS = 0x0000
NOT_ALLOWED = 0x0124
OUT_OF_RESOURCES = 0xA700
DOES_NOT_MATCH = 0xA900
CANNOT_UNDERSTAND = 0xC000
_ANSWERS = {Trouble.OTHER: DOES_NOT_MATCH}
_LONGEST_TITLE = 16
# Each association may hold one whole image in memory until it is on disk.
_ASSOCIATIONS = 8
# Image classes that the standard has withdrawn, and that older archives are full of.
_WITHDRAWN = {
    "WithdrawnUltrasoundMultiframe": "1.2.840.10008.5.1.4.1.1.3",
    "WithdrawnNuclearMedicine": "1.2.840.10008.5.1.4.1.1.5",
    "WithdrawnUltrasound": "1.2.840.10008.5.1.4.1.1.6",
    "WithdrawnBiplaneAngiography": "1.2.840.10008.5.1.4.1.1.12.3",
    "WithdrawnVisibleLight": "1.2.840.10008.5.1.4.1.1.77.1",
    "WithdrawnVisibleLightMultiframe": "1.2.840.10008.5.1.4.1.1.77.2",
}
for _keyword, _uid in _WITHDRAWN.items():
    register_uid(_uid, _keyword, StorageServiceClass)


@dataclass
class Received:
    """What came: counts only.

    Attributes:
        files: that are new.
        bytes: of these.
        same: that were there already, byte for byte.
        replaced: that took the place of another version; a corrected image keeps its UID.
        refused: images that were not taken, by reason.
        rejected: connections from callers that are not on the list, or that called somebody else.
    """

    files: int = 0
    bytes: int = 0
    same: int = 0
    replaced: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    rejected: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "refused": dict(sorted(self.refused.items()))}


class Receiver:
    """A storage service; listens from `start` (or entering the context) to `stop`.

    Attributes:
        received: what came so far.
        failure: the last time that something could not be written; None where everything could.

    Args:
        images: where files go.
        title: this service's AE title.
        port: to listen on; 0 takes a free one, see `port`.
        callers: AE titles that may send.
        address: to listen on; all of this machine's when not given.
        only_expected: take only what `expecting` announces.

    Raises:
        BadInput: a title or the port cannot be used.
    """

    def __init__(
        self,
        images: ImageFolder,
        *,
        title: str,
        port: int,
        callers: Sequence[str],
        address: str = "0.0.0.0",
        only_expected: bool = False,
    ) -> None:
        if not callers:
            raise BadInput("nobody is allowed to send; name the AE title of the archive or scanner")
        self.title = checked_title(title)
        self.received = Received()
        self.failure: StorageFailure | None = None
        self.port = port
        self._images = images
        self._address = address
        self._only_expected = only_expected
        self._expected: set[str] = set()
        self._lock = threading.Lock()
        self._entity = AE(ae_title=self.title)
        self._entity.require_called_aet = True
        self._entity.require_calling_aet = [checked_title(caller) for caller in callers]
        self._entity.maximum_associations = _ASSOCIATIONS
        self._entity.add_supported_context(Verification)
        classes = [str(context.abstract_syntax) for context in AllStoragePresentationContexts]
        for image_class in (*classes, *_WITHDRAWN.values()):
            self._entity.add_supported_context(image_class, ALL_TRANSFER_SYNTAXES)
        self._server: Any = None
        self._quiet = ExitStack()

    def start(self) -> None:
        self._quiet.enter_context(quiet_libraries())
        handlers = [
            (evt.EVT_CONN_OPEN, without_delay),
            (evt.EVT_C_STORE, self._store),
            (evt.EVT_REJECTED, self._reject),
        ]
        try:
            self._server = self._entity.start_server((self._address, self.port), block=False, evt_handlers=handlers)
        except OSError as error:
            self._quiet.close()
            raise BadInput(f"port {self.port} cannot be listened on ({error.strerror}); choose another") from None
        self.port = self._server.socket.getsockname()[1]

    def stop(self, *, seconds: float = 5.0) -> None:
        """Take no more connections, let those that are open come to an end for some seconds, then break them off."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server = None
        end = time.monotonic() + seconds
        while any(open_one.is_established for open_one in self._entity.active_associations) and time.monotonic() < end:
            time.sleep(0.05)
        for open_one in self._entity.active_associations:
            if open_one.is_established:
                open_one.abort()
            else:
                # One that has not said who it is cannot be aborted: pynetdicom's own shutdown stumbles over it.
                open_one.dul.kill_dul()
                open_one.kill()
                if open_one.dul.socket is not None:
                    open_one.dul.socket.close()
        self._quiet.close()

    def __enter__(self) -> Receiver:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def expecting(self, uids: set[str]) -> Iterator[None]:
        """Take images with these SOP instance UIDs meanwhile."""
        with self._lock:
            self._expected |= uids
        try:
            yield
        finally:
            with self._lock:
                self._expected -= uids

    def _store(self, event: evt.Event) -> int:
        """Keeps one image; the number is the status that the sender gets."""
        uid = str(event.request.AffectedSOPInstanceUID)
        if self._only_expected and uid not in self._expected:
            return self._refuse("not asked for", NOT_ALLOWED)
        try:
            kept, size = self._images.put(uid, _file(event))
        except Lost as error:
            return self._refuse(error.trouble.value, _ANSWERS.get(error.trouble, CANNOT_UNDERSTAND))
        except StorageFailure as failure:
            self.failure = failure
            return self._refuse("could not be written, the disk may be full", OUT_OF_RESOURCES)
        with self._lock:
            self.received.files += kept == "new"
            self.received.bytes += size if kept == "new" else 0
            self.received.same += kept == "same"
            self.received.replaced += kept == "replaced"
        return SUCCESS

    def _refuse(self, reason: str, status: int) -> int:
        with self._lock:
            self.received.refused[reason] += 1
        return status

    def _reject(self, _event: evt.Event) -> None:
        with self._lock:
            self.received.rejected += 1


def _file(event: evt.Event) -> Iterator[bytes | memoryview]:
    """The image as a file: a header about the transfer syntax, then the sender's own bytes."""
    yield b"\0" * 128 + b"DICM" + encode_file_meta(event.file_meta)
    yield event.request.DataSet.getbuffer()


def without_delay(event: evt.Event) -> None:
    """Have short messages sent at once: the usual waiting for more costs 40 ms a message, many times an image's own."""
    connection = event.assoc.dul.socket
    if connection is not None and connection.socket is not None:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def checked_title(title: str) -> str:
    """An AE title as the standard allows it.

    Raises:
        BadInput: it is too long or has other characters.
    """
    stripped = title.strip(" ")
    if not stripped or len(stripped) > _LONGEST_TITLE or not stripped.isascii() or not stripped.isprintable():
        raise BadInput(f"an AE title has 1 to {_LONGEST_TITLE} plain characters; correct it")
    if "\\" in stripped:
        raise BadInput("an AE title has no backslash; correct it")
    return stripped
