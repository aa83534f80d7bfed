"""A site's masked side of a run: what it trained stays in its outbox, and leaves only as its part of a sum.

Every message of the protocol is one task. The server's requests are checked here against what this site itself
received and trained; the state machine in ``privacy/secagg`` then checks what other sites and the server sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossward.federation.contract import Payload, Report, Tally, Vector
from crossward.federation.scopes import tensors_digest
from crossward.privacy.secagg.attempt import Blamed
from crossward.privacy.secagg.identity import Identity
from crossward.privacy.secagg.keys import derive
from crossward.privacy.secagg.memory import hold_to
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from crossward.privacy.secagg.sketch import rotation, sketch
from crossward.privacy.secagg.strikes import Strikes
from crossward.privacy.sums import TEST, Kind, MaskedAlgebra, Request, received_digest
from crossward.site import messages
from crossward.site.mask_memory import DurableMemory
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    JOIN,
    KEYS,
    REVEAL,
    ROSTER,
    SURVIVORS,
    TRAIN,
    Message,
)
from crossward.site.one_sum import EVERY_STUDY, hold_to_one_sum, tensor_digests
from crossward.site.participant import Participant
from crossward.site.troubles import Code, Refusal
from crossward.site.unsealing import turned, unsealed

MOST_SKETCHES = 4
"""Keys under which one update is sketched: the numbers of so many sketches are at most half of a block's values."""

_MOST_RANGES = 4


@dataclass(frozen=True)
class Credentials:
    """A site's certificate with its key, its own copy of the federation's root, and who is known to be no site."""

    identity: Identity
    roots: bytes
    outsiders: frozenset[str] = frozenset()


class Release:
    """What leaves a site under secure aggregation.

    Args:
        participant: trains, and keeps what it trained.
        masking: settings of the signed job, checked against the site's policy by the caller.
        study: digest of what is trained, the same in every run of it.
        job: the job's own name, without the number of the agreement on keys.
        credentials: who the site is.
        memory: folder of what the site's masks were used for; the site's, not the run's.
        strikes: of the job, which may be about more than one run.
        threads: for masking.
    """

    def __init__(
        self,
        participant: Participant,
        *,
        masking: Settings,
        study: str,
        job: str,
        credentials: Credentials,
        memory: Path,
        strikes: Strikes | None = None,
        threads: int = 1,
    ) -> None:
        self._participant = participant
        self._masking = masking
        self._study = study
        self._job = job
        self._credentials = credentials
        self._memory = DurableMemory(memory)
        self._strikes = strikes or Strikes()
        self._threads = threads
        self._masked = MaskedAlgebra(participant.algebra, bits=masking.bits, reach=participant.reach)
        self._secure: SecureSite | None = None
        self._model, self._round = "", 0
        self._reports: dict[Kind, Report] = {}
        self._digests: dict[Kind, str] = {}
        self._tensors: dict[str, str] = {}
        self._request: Request | None = None
        self.tasks: Mapping[str, Callable[[Mapping[str, Any]], Message]] = {
            JOIN: self._join,
            ROSTER: self._roster,
            KEYS: self._keys,
            TRAIN: self._train,
            EVALUATE: self._evaluate,
            BEGIN: self._begin,
            CONTRIBUTE: self._contribute,
            SURVIVORS: self._survivors,
            REVEAL: self._reveal,
        }

    def _join(self, message: Mapping[str, Any]) -> Message:
        """New keys, also in the middle of a job, when a site has lost its own; none where this site has left it."""
        self._stay()
        agreement = message.get("agreement")
        if type(agreement) is not int:
            raise Refusal(Code.BAD_TASK)
        # What was turned by the old keys fits no sum under new ones.
        self._request, self._reports, self._digests = None, {}, {}
        self._secure = SecureSite(
            self._participant.name,
            f"{self._job}/{agreement}",
            settings=self._masking,
            identity=self._credentials.identity,
            roots=self._credentials.roots,
            memory=self._memory,
            outsiders=self._credentials.outsiders,
            strikes=self._strikes,
            threads=self._threads,
        )
        return {"hello": self._secure.hello()}

    def _roster(self, message: Mapping[str, Any]) -> Message:
        return {"joined": self._keyed().join(_part(message, "hellos", list))}

    def _keys(self, message: Mapping[str, Any]) -> Message:
        self._keyed().take_group(_part(message, "joined", dict))
        return {}

    def _train(self, message: Mapping[str, Any]) -> Message:
        secure = self._keyed()
        payload = messages.unpack_payload(message)
        opened = self._received(payload)
        validation = self._participant.receive(opened) if payload.round_number else {}
        trained = self._participant.train(opened, validation)
        report = self._turned(trained, secure)
        self._reports = dict.fromkeys((Kind.TOTALS, Kind.RANGES, Kind.UPDATES), report)
        # Of the report as it was trained: it is turned by another key in another job, and is the same report.
        self._digests = dict.fromkeys(self._reports, _digest_of(trained))
        self._tensors = tensor_digests(trained.update)
        return {"round": report.round_number, "cosines": self._cosines(report, secure)}

    def _evaluate(self, message: Mapping[str, Any]) -> Message:
        payload = messages.unpack_payload(message)
        validation = self._participant.receive(self._received(payload))
        self._reports, self._digests = {}, {}
        self._count(Kind.VALIDATION, payload.round_number, validation)
        return {"round": payload.round_number}

    def restore(self, payload: Payload) -> Payload:
        """The model of an earlier round in a form that this site can install."""
        return self._opened(payload)

    def tested(self, images: float, correct: float) -> None:
        """Keep what was counted on the test images for a sum."""
        values = (np.array([images]), np.array([correct]))
        self._count(Kind.TEST, self._round, dict(zip(TEST, values, strict=True)))

    def _begin(self, message: Mapping[str, Any]) -> Message:
        request = self._requested(message)
        binding = self._masked.binding(request, study=self._study, model=self._model)
        if request.kind is Kind.UPDATES:
            self._hold(f"ranges of {binding.model}", json.dumps(sorted(request.limits.items())), most=_MOST_RANGES)
        note = self._masked.rows(request, self._reports[request.kind])
        shares = self._keyed().begin(binding, note=note)
        self._request = request
        return {"round": request.round_number, "shares": shares}

    def _contribute(self, message: Mapping[str, Any]) -> Message:
        request, secure = self._requested(message), self._keyed()
        if self._request is None or request.message() != self._request.message():
            raise Refusal(Code.NOT_MASKED)
        layout = self._masked.layout(request)
        contribution, tally = self._masked.parts(request, self._reports[request.kind])
        checks = secure.group_key("checks", round_number=request.round_number) if layout.slots else None
        words = layout.encode(
            contribution,
            tally,
            request.limits,
            rounding_key=self._chances(request),
            checks_key=checks,
            cut_off=not self._masked.limits,
        )
        del contribution
        try:
            upload = secure.contribute(
                _part(message, "inbox", dict),
                words,
                update=self._digests[request.kind],
                slots=layout.slots,
                heed=lambda notes: self._heed(request, notes),
            )
        except Blamed as fault:
            if not fault.message:
                raise
            return {"round": request.round_number, "blame": fault.message}
        if request.kind is Kind.UPDATES:
            # Keys of an attempt that failed do not open this one; its own come when it is opened.
            self._participant.vault.keep_keys(request.round_number, {})
        return {"round": request.round_number, "vector": layout.ring.pack(words), "upload": upload}

    def _heed(self, request: Request, notes: Mapping[str, bytes]) -> None:
        """See from what the others sealed to this site that its part is hidden among theirs."""
        self._demand_whole(request, notes)
        if request.kind is Kind.UPDATES:
            self._masked.check_rows(self._name, notes, fewest=self._masking.fewest)
        self._hold_to_one_sum(request, notes)

    def _hold_to_one_sum(self, request: Request, sites: Collection[str]) -> None:
        """Before something is masked, and before it is opened with fewer sites than it was masked for."""
        ways = self._masked.ways(request, self._reports[request.kind])
        hold_to_one_sum(
            self._memory,
            owner=hashlib.sha256(f"{self._study} {self._model}".encode()).hexdigest(),
            kind=request.kind.value,
            round_number=request.round_number,
            sites=tuple(sorted(sites)),
            ways={self._tensors[name]: way for name, way in ways.items() if name in self._tensors},
        )

    @staticmethod
    def _demand_whole(request: Request, sites: Collection[str]) -> None:
        if request.whole and set(sites) != set(request.cohort):
            raise Refusal(Code.NOT_MASKED)

    def _survivors(self, message: Mapping[str, Any]) -> Message:
        uploads = _part(message, "uploads", dict)
        if self._request is None:
            raise Refusal(Code.NOT_MASKED)
        self._demand_whole(self._request, uploads)
        self._hold_to_one_sum(self._request, [site for site in self._request.cohort if site in uploads])
        return self._opening(self._keyed().survivors(uploads))

    def _reveal(self, message: Mapping[str, Any]) -> Message:
        opening = self._keyed().reveal(_part(message, "agreements", dict))
        return self._opening(opening)

    def _opening(self, opening: bytes) -> Message:
        request, secure = self._request, self._keyed()
        if request is None:
            raise Refusal(Code.NOT_MASKED)
        if secure.state == "opened" and request.kind is Kind.UPDATES:
            self._keep_keys(request, secure)
        return {"round": request.round_number, "opening": opening}

    def _keep_keys(self, request: Request, secure: SecureSite) -> None:
        """What opens the result for this site is on disk before the result can exist."""
        keys: dict[str, Any] = {
            name: secure.group_key("rotation", round_number=request.round_number, parts=[name]).hex()
            for name in self._masked.rotated
        }
        kept: dict[str, Any] = {"rotations": keys}
        if self._masked.personal and request.plan is not None:
            # Of what the server sends with the result only the numbers under pads are believed.
            kept |= {
                "pads": [key.hex() for key in secure.take_pads()],
                "checks": secure.group_key("checks", round_number=request.round_number).hex(),
                "limits": {name: request.limits[name] for name in self._masked.personal},
                "divisors": self._masked.divisors(request.plan, self._name),
                "parties": len(request.cohort),
            }
        self._participant.vault.keep_keys(request.round_number, kept)

    def _requested(self, message: Mapping[str, Any]) -> Request:
        request = Request.from_message(_part(message, "sum", dict))
        self._masked.check(request)
        report = self._reports.get(request.kind)
        after = 1 if request.kind in (Kind.VALIDATION, Kind.TEST) else 0
        if report is None or self._name not in request.cohort or report.round_number + after != request.round_number:
            raise Refusal(Code.NOT_MASKED)
        return request

    @property
    def _sketched(self) -> list[str]:
        return [name for names in self._masked.sketched.values() for name in names]

    @property
    def _name(self) -> str:
        return self._participant.name

    def _keyed(self) -> SecureSite:
        self._stay()
        if self._secure is None:
            raise Refusal(Code.NO_KEYS)
        return self._secure

    def _stay(self) -> None:
        if self._strikes.out:
            raise Refusal(Code.LEFT_JOB)

    def _received(self, payload: Payload) -> Payload:
        model = received_digest(payload.tensors, payload.plan)
        # A second model of a round, however little it differs, would be trained with the same chances.
        self._hold(f"the model of round {payload.round_number}", model)
        self._model, self._round = model, payload.round_number
        self._request = None
        return self._opened(payload)

    def _hold(self, what: str, value: str, *, most: int = 1, study: str | None = None) -> None:
        value, study = hashlib.sha256(value.encode()).hexdigest(), self._study if study is None else study
        hold_to(self._memory, study, what, value, job=self._job, most=most)

    def _opened(self, payload: Payload) -> Payload:
        return unsealed(payload, self._participant, self._masked, cipher=self._masking.cipher, threads=self._threads)

    def _turned(self, report: Report, secure: SecureSite) -> Report:
        """Turn the vectors whose cosines the server needs by a key that it does not know."""
        update = dict(report.update)
        for name in self._masked.rotated:
            key = secure.group_key("rotation", round_number=report.round_number, parts=[name])
            update[name] = turned(update[name], rotation(update[name].shape[1], key))
        return replace(report, update=update)

    def _cosines(self, report: Report, secure: SecureSite) -> dict[str, Vector]:
        """What the server compares sites by: sketches under a key of the sites, and turned vectors of length 1."""
        if self._masked.sketched:
            # Whoever colludes knows the keys, and every key gives equations for each other site's update.
            key = secure.group_key("sketches", round_number=report.round_number)
            self._hold(f"sketches from {self._model}", key.hex(), most=MOST_SKETCHES)
            # Nearly the same study trains the same, and would have as many again.
            if trained := sorted(self._tensors[name] for name in self._sketched if name in self._tensors):
                self._hold(f"sketches of {' '.join(trained)}", key.hex(), most=MOST_SKETCHES, study=EVERY_STUDY)
        found: dict[str, Vector] = {}
        for block, name in self._masked.rotated_blocks.items():
            vector = report.update[name].double().reshape(-1)
            found[block] = (vector / vector.norm().clamp_min(1e-30)).numpy()
        for block, names in self._masked.sketched.items():
            key = secure.group_key("sketch", round_number=report.round_number, parts=[block])
            found[block] = sketch((report.update[name].numpy().reshape(-1) for name in names), key)
        return found

    def _count(self, kind: Kind, round_number: int, tally: Tally) -> None:
        self._reports[kind] = Report(self._name, round_number, self._model, {}, tally)
        self._digests[kind] = _digest_of(self._reports[kind])

    def _chances(self, request: Request) -> bytes | None:
        """The key of chance rounding, where a ring is small; the same at every attempt."""
        if self._masking.bits == 32:
            return None
        parts = [request.kind.value, request.round_number, self._model]
        return derive(self._participant.vault.secret(), "chances", parts=parts)


def _digest_of(report: Report) -> str:
    """What a site's part of a sum was made from, whatever masks and plans it gets."""
    numbers = {key: value.tolist() for key, value in sorted({**report.tally, **report.validation}.items())}
    content = f"{tensors_digest(report.update)} {json.dumps(numbers)}"
    return hashlib.sha256(content.encode()).hexdigest()


def _part(message: Mapping[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if not isinstance(value, kind):
        raise Refusal(Code.BAD_TASK)
    return value
