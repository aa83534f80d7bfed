"""Our side of ``bench secagg`` as a worker process: real sites and a real server, with throw-away certificates.

Beside it, in the same process: a plain sum in numpy, and how fast this machine makes and adds a mask at best.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from crossward.cli.bench_secagg_flower import Peak, Stopwatch, Updates, relative_error, serve
from crossward.federation.contract import ALL, Contribution, Share
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import digest
from crossward.privacy.secagg.masks import CHUNK_BYTES, WORD, Words
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.server import Attempt, SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from crossward.privacy.secagg.throwaway import Authority
from crossward.privacy.secagg.vector import VectorLayout

_JOB = "bench"
_UPDATE = digest("update").hex()
_LIMIT_CHUNKS = 128


class Parts:
    """Sites' contributions to one sum, and how they are written."""

    def __init__(self, parameters: int, sites: int) -> None:
        self.updates = Updates(parameters, sites)
        self._weights = self.updates.weights()
        names = [f"tensor-{number}" for number in range(len(self.updates.sizes))]
        products = (max(self._weights) * value for value in self.updates.largest())
        self.limits = {name: 2.0 ** math.frexp(product)[1] for name, product in zip(names, products, strict=True)}
        self.layout = VectorLayout(self.of(0), {}, parties=sites)

    def of(self, site: int) -> Contribution:
        values = zip(self.limits, self.updates.of(site), strict=True)
        return {ALL: {name: Share(self._weights[site], torch.from_numpy(value)) for name, value in values}}

    def encode(self, contribution: Contribution) -> Words:
        return self.layout.encode(contribution, {}, self.limits)

    def decode(self, words: Words) -> list[NDArray[np.float64]]:
        return [summed.value.numpy() for _, summed in self.layout.sums(words, self.limits)]


class Ours:
    """Sites and server of SA-1 in one process."""

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads
        self.about = {"cryptography": version("cryptography")}

    def prepare(self, parameters: int, sites: int) -> dict[str, Any]:
        """Let so many sites agree on keys; gives the time that one of them needs for it, once a job."""
        self._parts = Parts(parameters, sites)
        authority, settings = Authority(), Settings()
        self._server = SecureServer(_JOB, settings=settings, roots=authority.roots, threads=self._threads)
        self._sites = {
            name: SecureSite(
                name,
                _JOB,
                settings=settings,
                identity=authority.identity(name),
                roots=authority.roots,
                memory=Forgetful(),
                threads=self._threads,
            )
            for name in (f"site-{number:03d}" for number in range(sites))
        }
        self._first = min(self._sites)
        self._attempts = 0
        self._own = self._parts.of(0)
        self._vectors: list[list[NDArray[np.float32]]] = []
        watch = Stopwatch()
        for name, site in self._sites.items():
            with self._only_first(name, watch):
                greeting = site.hello()
            self._server.take_hello(name, greeting)
        hellos = self._server.hellos()
        for name, site in self._sites.items():
            with self._only_first(name, watch):
                answer = site.join(hellos)
            self._server.take_joined(name, answer)
        for name, site in self._sites.items():
            with self._only_first(name, watch):
                site.take_group(self._server.joined())
        return watch.figures()

    def _only_first(self, name: str, watch: Stopwatch) -> Stopwatch | nullcontext[None]:
        return watch if name == self._first else nullcontext()

    def _shared(self, site_watch: Stopwatch, server_watch: Stopwatch) -> tuple[Attempt, int]:
        """A new attempt in which all have shared their secrets, and the bytes that one of them sent for it."""
        self._attempts += 1
        binding = Binding(
            study=_JOB,
            round_number=1,
            attempt=self._attempts,
            cohort=tuple(self._sites),
            model="",
            plan="",
            layout=self._parts.layout.digest(self._parts.limits),
        )
        attempt = self._server.attempt(binding, words=self._parts.layout.words)
        sent = {}
        for name, site in self._sites.items():
            with self._only_first(name, site_watch):
                message = site.begin(binding)
            with server_watch:
                attempt.take_shares(name, message)
            sent[name] = len(message)
        attempt.close_sharing()
        return attempt, sent[self._first]

    def client(self, memory: bool = False) -> dict[str, Any]:
        """One site's work: keys of the attempt, shares, fixed point, masks, signature, and bytes to send."""
        watch, peak = Stopwatch(), Peak()
        attempt, shared = self._shared(watch, Stopwatch())
        site, inbox = self._sites[self._first], attempt.inbox(self._first)
        with peak if memory else nullcontext(), watch:
            words = self._parts.encode(self._own)
            signed = site.contribute(inbox, words, update=_UPDATE)
            vector = self._parts.layout.ring.pack(words)
        return {**watch.figures(), "bytes": shared + len(signed) + len(vector), "memory": peak.extra}

    def server(self) -> dict[str, Any]:
        """The server's work once all have sent: add up, take masks off, decode, and how wrong the average is.

        Shares are taken before any vector is there, and are timed by themselves.
        """
        watches = {step: Stopwatch() for step in ("shares", "sum", "open", "decode")}
        attempt, _ = self._shared(Stopwatch(), watches["shares"])
        sent = {}
        for number, (name, site) in enumerate(self._sites.items()):
            words = self._parts.encode(self._parts.of(number))
            signed = site.contribute(attempt.inbox(name), words, update=_UPDATE)
            sent[name] = signed, self._parts.layout.ring.pack(words)
        with watches["sum"]:
            for name, (signed, vector) in sent.items():
                attempt.take_vector(name, signed, self._parts.layout.ring.unpack(vector))
            uploads = attempt.close_uploads()
        reveals = {name: site.survivors(uploads) for name, site in self._sites.items()}
        with watches["open"]:
            for name, reveal in reveals.items():
                attempt.take_reveal(name, reveal)
            opened = attempt.open()
        with watches["decode"]:
            found = self._parts.decode(opened)
        steps = {step: watch.figures() for step, watch in watches.items()}
        work = [steps[step] for step in ("sum", "open", "decode")]
        return {
            "seconds": sum(each["seconds"] for each in work),
            "processor": sum(each["processor"] for each in work),
            "steps": steps,
            "error": relative_error(found, self._parts.updates.average()),
        }

    def plain(self) -> dict[str, Any]:
        """The same updates, unmasked, added up by numpy in float32 as they are."""
        if not self._vectors:
            self._vectors = [self._parts.updates.of(site) for site in range(len(self._sites))]
        watch = Stopwatch()
        with watch:
            totals = [np.zeros(size, dtype=np.float32) for size in self._parts.updates.sizes]
            for vector in self._vectors:
                for total, values in zip(totals, vector, strict=True):
                    np.add(total, values, out=total)
        return watch.figures()

    def limit(self) -> dict[str, float]:
        """Bytes a second of AES-256-CTR and of adding 32-bit words, on pieces that stay in the cache."""
        zeros, buffer = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES + 16)
        stream = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
        words = np.zeros(CHUNK_BYTES // WORD, dtype=np.uint32)
        ciphering, adding = Stopwatch(), Stopwatch()
        with ciphering:
            for _ in range(_LIMIT_CHUNKS):
                stream.update_into(zeros, buffer)
        mask = np.frombuffer(buffer, dtype=np.uint32, count=len(words))
        with adding:
            for _ in range(_LIMIT_CHUNKS):
                np.add(words, mask, out=words)
        size = _LIMIT_CHUNKS * CHUNK_BYTES
        return {"aes": size / ciphering.seconds, "add": size / adding.seconds}

    def error(self, parameters: int, sites: int) -> dict[str, float]:
        """How wrong the average is in fixed point, and in float32 as FedAvg adds it up; one site's vector at a time.

        Without masks, which are whole numbers and cancel exactly: ``server`` goes through them.
        """
        parts = Parts(parameters, sites)
        total = np.zeros(parts.layout.words, dtype=np.uint32)
        plain = [np.zeros(size, dtype=np.float32) for size in parts.updates.sizes]
        for site in range(sites):
            contribution = parts.of(site)
            np.add(total, parts.encode(contribution), out=total)
            _add_plainly(plain, contribution)
        exact = parts.updates.average()
        return {"ours": relative_error(parts.decode(total), exact), "float32": relative_error(plain, exact)}


def _add_plainly(totals: Sequence[NDArray[np.float32]], contribution: Contribution) -> None:
    for total, share in zip(totals, contribution[ALL].values(), strict=True):
        total += np.float32(share.coefficient) * share.value.numpy()


if __name__ == "__main__":
    serve(lambda: Ours(threads=int(sys.argv[1])))
