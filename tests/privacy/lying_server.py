"""A server that lies, and sites that collude with it: one random run of SA-1, watched by the observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.keys import JobKeys, sign
from crossward.privacy.secagg.masks import Words
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.messages import AGREED, REVEAL, UPLOAD, set_digest
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.settings import Settings
from tests.privacy.federation import Authority, authority, identity
from tests.privacy.observer import Observer, WatchedSite

WORDS = 8
STAGES = ("refused at the keys", "nobody masked", "masked upload", "agreed to survivors", "completed")
_STRANGERS = Authority()


@dataclass
class Job:
    """One job's sites; they keep their memories from job to job."""

    name: str
    sites: dict[str, WatchedSite]
    copies: dict[str, JobKeys] = field(default_factory=dict)
    """What a site's own people may have copied of its keys: it signs with them also after the site has left."""
    round_number: int = 1
    attempt: int = 0
    old_boxes: list[tuple[str, str, bytes]] = field(default_factory=list)
    old_uploads: list[dict[str, bytes]] = field(default_factory=list)
    old_agreements: list[dict[str, bytes]] = field(default_factory=list)


class Tastes:
    """What a lying server does. Every run has a taste of its own: most tricks are rare or unknown in it, some frequent.

    Tricks of one plot, which are of use to a server together only, are to its taste together.
    """

    def __init__(self, dice: Random) -> None:
        self.told: Counter[str] = Counter()
        self._dice = dice
        self._tastes: dict[str, int] = {}

    def happens(self, what: str, chance: float, *, plot: str = "") -> bool:
        if (plot or what) not in self._tastes:
            self._tastes[plot or what] = self._dice.choice([0, 0, 4] if plot else [0, 0, 0, 0, 0, 0, 1, 1, 4])
        happens = self._dice.random() < min(0.8, chance * self._tastes[plot or what])
        self.told[what] += happens
        return happens


class Run:
    """One run of the protocol under one lying server.

    Args:
        seed: of everything that the adversary decides.
    """

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        tastes = Tastes(self.dice)
        self.told, self._happens = tastes.told, tastes.happens
        self.refused: Counter[str] = Counter()
        self.stage = 0
        count = self.dice.randint(3, 7)
        self.settings = Settings(colluders=self.dice.choice([1, 1, 2]) if count > 3 else 1)
        self.names = [f"site-{number:02d}" for number in self.dice.sample(range(64), count)]
        most = self.settings.colluders
        self.colluding = set(self.dice.sample(self.names, self.dice.choice([0, 1, most, most, most])))
        self.observer = Observer(self.colluding, max(3, self.settings.colluders + 2))
        self.memories = {name: Forgetful() for name in self.names}
        self.model = 0
        self.trained: Counter[str] = Counter()
        self.have_opened: set[str] = set()
        self.last_view: set[str] = set()
        self.jobs: list[Job] = []

    def go(self) -> list[str]:
        """Play the run; gives what the observer has to say against it."""
        if self._new_job(self.names):
            for _ in range(self.dice.randint(1, 6)):
                self._attempt(self.dice.choice(self.jobs))
                if self._happens("another job over the same model", 0.2):
                    names = list(self.names)
                    if self._happens("the job comes again with one site fewer", 0.4):
                        names.remove(self.dice.choice(names))
                    self._new_job(names)
        if self.observer.sums():
            self._reached("completed")
        return self.observer.broken()

    def _reached(self, stage: str) -> None:
        self.stage = max(self.stage, STAGES.index(stage))

    def _ask(self, step: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """A site's answer, or None where it refuses. Any other error is a crash, and the run fails."""
        try:
            return function(*values, **options)
        except PrivacyRefusal as refusal:
            self.refused[f"{step}: {type(refusal).__name__}"] += 1
            return None

    # Keys

    def _new_job(self, names: list[str]) -> bool:
        job = Job(f"job-{len(self.jobs)}", {})
        for name in names:
            job.sites[name] = site = WatchedSite(
                name,
                job.name,
                settings=self.settings,
                identity=identity(name),
                roots=authority().roots,
                memory=self.memories[name],
            )
            site.observer = self.observer
            job.copies[name] = copy(site._keys)
        hellos = {name: site.hello() for name, site in job.sites.items()}
        joined = {}
        for name, site in job.sites.items():
            answer = self._ask("join", site.join, self._hellos(hellos, job))
            if answer is not None:
                joined[name] = answer
        if self._happens("an answer to the roster is kept back", 0.015) and joined:
            joined.popitem()
        keyed = [name for name, site in job.sites.items() if self._took_group(site, joined)]
        if keyed:
            self.jobs.append(job)
            self._reached("nobody masked")
        return bool(keyed)

    def _took_group(self, site: WatchedSite, joined: Mapping[str, bytes]) -> bool:
        self._ask("take_group", site.take_group, joined)
        return site.state == "keyed"

    def _hellos(self, hellos: Mapping[str, bytes], job: Job) -> list[bytes]:
        told = dict(hellos)
        victim = self.dice.choice(sorted(told))
        if self._happens("another key in a hello", 0.01):
            outer = decode(told[victim])
            body = {**decode(outer["body"]), "agree_key": JobKeys().agree_key}
            told[victim] = encode({**outer, "body": encode(body)})
        if self._happens("a site of another root", 0.01):
            stranger = WatchedSite(
                victim,
                job.name,
                settings=self.settings,
                identity=_stranger(victim),
                roots=authority().roots,
                memory=Forgetful(),
            )
            told[victim] = stranger.hello()
        if self._happens("one site fewer on the roster of one site", 0.01):
            del told[victim]
        if self._happens("keys of another job", 0.01) and self.jobs:
            told[victim] = WatchedSite(
                victim,
                self.jobs[0].name,
                settings=self.settings,
                identity=identity(victim),
                roots=authority().roots,
                memory=Forgetful(),
            ).hello()
        return self.dice.sample(sorted(told.values()), len(told))

    # One attempt

    def _attempt(self, job: Job, *, inner: bool = False) -> None:
        if job.attempt and self._happens("on to the next model", 0.25):
            self.model += 1
            self.have_opened.clear()
            job.round_number, job.attempt = job.round_number + 1, 0
        job.attempt += 1
        cohort = [name for name in job.sites if job.sites[name].state not in ("left", "joined", "greeted")]
        if self._happens("a smaller cohort", 0.15) and cohort:
            cohort.remove(self.dice.choice(cohort))
        if self.have_opened and self._happens("the same again without those that opened", 0.3, plot="few openers"):
            cohort = [name for name in cohort if name in self.last_view and name not in self.have_opened]
        boxes = self._begin(job, cohort)
        uploads = self._contribute(job, boxes)
        if not inner and self._happens("another job in between", 0.15):
            self._attempt(self.dice.choice([each for each in self.jobs if each is not job] or [job]), inner=True)
        self._finish(job, uploads)

    def _begin(self, job: Job, cohort: list[str]) -> dict[str, list[dict[str, bytes]]]:
        twice = cohort and self._happens("a plan that counts one site twice", 0.12)
        usual = {
            "study": "run",
            "round_number": job.round_number,
            "attempt": job.attempt,
            "cohort": tuple(sorted(cohort)),
            "model": f"model {self.model}",
            "plan": f"twice {self.dice.choice(cohort)}" if twice else "once",
            "layout": "layout",
        }
        odd = {self.dice.choice(cohort): self._odd(job, cohort)} if cohort else {}
        boxes: dict[str, list[dict[str, bytes]]] = {}
        for name in self.dice.sample(cohort, len(cohort)):
            if self._happens("a site is not there to share", 0.03):
                continue
            about = Binding(**{**usual, **odd.get(name, {})})
            for _ in range(1 + self._happens("begins twice", 0.03)):
                answer = self._ask("begin", job.sites[name].begin, about)
                if answer is not None:
                    boxes.setdefault(name, []).append(decode(answer)["boxes"])
        return boxes

    def _odd(self, job: Job, cohort: list[str]) -> dict[str, Any]:
        """What one site is told in another way than the others."""
        changes: dict[str, Any] = {}
        if self._happens("another model for one site", 0.05):
            changes["model"] = "another model"
        if self._happens("weights 1 and 0 for one site", 0.05):
            changes["plan"] = f"only {self.dice.choice(cohort)}"
        if self._happens("another layout for one site", 0.05):
            changes["layout"] = "another layout"
        if self._happens("an earlier attempt again", 0.05) and job.attempt > 1:
            changes["attempt"] = job.attempt - 1
        if self._happens("a cohort without one, for one site", 0.05):
            changes["cohort"] = tuple(sorted(set(cohort) - {self.dice.choice(cohort)}))
        return changes

    def _contribute(self, job: Job, boxes: Mapping[str, list[dict[str, bytes]]]) -> dict[str, bytes]:
        sharers = sorted(boxes)
        if self._happens("a sharer is forgotten", 0.025) and sharers:
            sharers.remove(self.dice.choice(sharers))
        uploads: dict[str, bytes] = {}
        for name in self.dice.sample(sharers, len(sharers)):
            site = job.sites[name]
            if self._happens("a site is not there to upload", 0.06) or site.state != "shared":
                continue
            inbox = {
                sender: self.dice.choice(boxes[sender])[name]
                for sender in sharers
                if sender != name and name in boxes[sender][-1]
            }
            self._spoil(job, inbox, boxes)
            about = site.watched_begun.about
            spoil = self._spoiler()
            update = f"{self._update(name, about.model)} {spoil}"
            coefficient = _coefficient(about.plan, name)
            words = self._ask("encode", _words, name, about.model, update, coefficient, spoil=spoil)
            if words is None:
                continue
            answer = self._ask(
                "contribute", site.watched_contribute, inbox, words, update=update, coefficient=coefficient
            )
            if answer is not None:
                uploads[name] = answer
                self._reached("masked upload")
            if self._happens("a site crashes", 0.02):
                site.leave()
        job.old_boxes += [(name, peer, box) for name, each in boxes.items() for peer, box in each[-1].items()]
        return uploads

    def _update(self, name: str, model: str) -> str:
        self.trained[name] += self._happens("a site trains again", 0.06, plot="unasked")
        return f"{model} {self.trained[name]}"

    def _spoiler(self) -> str:
        if self._happens("a value that is no number", 0.01):
            return "nan"
        return "large" if self._happens("values out of range", 0.015) else ""

    def _spoil(self, job: Job, inbox: dict[str, bytes], boxes: Mapping[str, list[dict[str, bytes]]]) -> None:
        if not inbox:
            return
        sender = self.dice.choice(sorted(inbox))
        if self._happens("a message is lost", 0.01):
            del inbox[sender]
        elif self._happens("a message is changed", 0.01):
            inbox[sender] = _flipped(inbox[sender], self.dice)
        elif self._happens("a message for another site", 0.01):
            inbox[sender] = self.dice.choice(sorted(boxes[sender][-1].values()))
        elif self._happens("a message of another attempt", 0.015) and job.old_boxes:
            inbox[sender] = self.dice.choice(job.old_boxes)[2]

    def _finish(self, job: Job, uploads: dict[str, bytes]) -> None:
        names = sorted(uploads)
        if not names:
            return
        views = [self._view(job, uploads)]
        if views[0] and self._happens("two sets of survivors", 0.2, plot="two answers"):
            without = self.dice.choice(sorted(views[0]))
            views.append({name: message for name, message in views[0].items() if name != without})
        if self._happens("uploads of another attempt", 0.015) and job.old_uploads:
            views.append(self.dice.choice(job.old_uploads))
        asked = self.dice.sample(names, len(names))
        if self._happens("asks as few as it takes, and those that are left out first", 0.3, plot="few openers"):
            takes = self.settings.threshold(len(job.sites)) - len(self.colluding & job.sites.keys())
            asked = sorted(set(asked) - self.colluding, key=lambda name: name in views[0])[:takes]
            views = views[:1]
        agreed: dict[str, tuple[int, bytes]] = {}
        everybody_twice = self._happens("asks everybody for every set", 0.1, plot="two answers")
        for name in asked:
            which = self.dice.randrange(len(views))
            if name not in views[which] and not self._happens("asks a site that is left out", 0.3, plot="few openers"):
                continue
            if self._happens("a site is not asked to open", 0.08, plot="unasked"):
                continue
            for chosen in range(len(views)) if everybody_twice else [which]:
                answer = self._ask("survivors", job.sites[name].survivors, views[chosen])
                if answer is not None and decode(answer)["kind"] == REVEAL:
                    self.have_opened |= {name} - self.colluding
                elif answer is not None:
                    agreed[name] = (chosen, answer)
                    self._reached("agreed to survivors")
        self._reveal(job, views, agreed)
        self.last_view = set(views[0])
        job.old_uploads.append(uploads)

    def _view(self, job: Job, uploads: Mapping[str, bytes]) -> dict[str, bytes]:
        """Whom the server says to be in the sum: some of those who uploaded, and whoever colludes."""
        fewest = max(self.observer.fewest, self.settings.threshold(len(job.sites)))
        if len(uploads) > fewest and self._happens("as few survivors as it takes", 0.3, plot="few openers"):
            kept = sorted(uploads, key=lambda name: (name not in self.colluding, self.dice.random()))[:fewest]
            view = {name: uploads[name] for name in kept}
        else:
            late = {name for name in uploads if self._happens("a vector is said to be late", 0.1)}
            view = {name: message for name, message in uploads.items() if name not in late}
        some = job.sites[next(iter(uploads))]
        for name in sorted(self.colluding & job.sites.keys() - uploads.keys()):
            if self._happens("a colluding site uploads nothing and signs", 0.4) and some._attempt is not None:
                body = {"sharers": set_digest(some._attempt.sharers), "vector": bytes(32)}
                view[name] = self._signed(job, name, UPLOAD, body, some._attempt.context)
        return view

    def _reveal(self, job: Job, views: list[dict[str, bytes]], agreed: Mapping[str, tuple[int, bytes]]) -> None:
        for name in self.dice.sample(sorted(agreed), len(agreed)):
            which = agreed[name][0]
            if self._happens("agreements to another set", 0.025):
                which = self.dice.randrange(len(views))
            attempt = job.sites[name]._attempt
            agreements = {each: message for each, (view, message) in agreed.items() if view == which}
            for each in sorted(self.colluding & job.sites.keys()):
                if attempt is not None:
                    body = {"survivors": set_digest(views[which])}
                    agreements[each] = self._signed(job, each, AGREED, body, attempt.context)
            if self._happens("agreements of another attempt", 0.015) and job.old_agreements:
                agreements = self.dice.choice(job.old_agreements)
            job.old_agreements.append(agreements)
            if not self._happens("a site is not asked to reveal", 0.06):
                answer = self._ask("reveal", job.sites[name].reveal, agreements)
                if answer is not None:
                    self.have_opened |= ({name} & views[which].keys()) - self.colluding
            if self._happens("asks twice to reveal", 0.025):
                self._ask("reveal", job.sites[name].reveal, agreements)

    def _signed(self, job: Job, name: str, kind: str, body: Mapping[str, Any], context: bytes) -> bytes:
        return sign(kind, body, sender=name, context=context, keys=job.copies[name])


def _coefficient(plan: str, site: str) -> int:
    """Of a site in a plan: ``once``, ``twice`` for one site, or ``only`` one site."""
    kind, _, named = plan.partition(" ")
    return {"once": (1, 1), "twice": (1, 2), "only": (0, 1)}[kind][site == named]


def _words(site: str, model: str, update: str, coefficient: int, *, spoil: str) -> Words:
    octets = np.frombuffer(sha256(f"{site} {model} {update}".encode()).digest(), np.uint8)[:WORDS]
    values = (octets.astype(np.float32) - 128) / 128
    if spoil:
        values[0] = {"nan": np.nan, "large": 1e9}[spoil]
    words = np.zeros(WORDS, np.uint32)
    Ring(32, 64).encode_into(words, values, weight=1 / 64, limit=1.0)
    return words * np.uint32(coefficient)


def _flipped(message: bytes, dice: Random) -> bytes:
    where = dice.randrange(len(message))
    return message[:where] + bytes([message[where] ^ (1 << dice.randrange(8))]) + message[where + 1 :]


def _stranger(name: str) -> Any:
    return _STRANGERS.identity(name)
