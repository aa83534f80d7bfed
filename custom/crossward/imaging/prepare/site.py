"""A site's images prepared once: from its folder of DICOM, by its ``site.yaml``, to cached pictures and a manifest.

What is finished is never done again: a run that was killed goes on where it stopped, and the next one reads only files
that are new or changed. Only the short pass in which steps learn from training images starts over when it is killed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import crossward
from crossward.federation.errors import BadInput
from crossward.federation.storage import private_folder
from crossward.imaging.folder import is_phantom
from crossward.imaging.inventory.scan import Found, scan
from crossward.imaging.prepare.cache import Cache, Kept, Key, held, places
from crossward.imaging.prepare.candidates import Candidate, Choice, choose
from crossward.imaging.prepare.file import Hashing, Lesson, Made, Recipe, Stamp, Wanted
from crossward.imaging.prepare.known_files import KnownFiles
from crossward.imaging.prepare.levels import pixels_in
from crossward.imaging.prepare.lines import Lines
from crossward.imaging.prepare.manifest import Manifest, Picture, Rejected, asked_digests, folder_of
from crossward.imaging.prepare.ready import augmentation
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.site import SiteRules
from crossward.imaging.secret import site_secret
from crossward.imaging.splits import TRAIN, Progress
from crossward.imaging.transforms import pipeline as transforms
from crossward.imaging.transforms.pipeline import Fitted, Fitter
from crossward.imaging.transforms.statistics import DomainStatistics, measure_picture
from crossward.imaging.workers import work

SMALLEST_SIZE: Final = 8
LEARNED_FROM: Final = 2000
"""Training images of a domain that steps and ranges of augmentation are learned from, at most."""
SECRET: Final = "secret"
_SECONDS_PER_FILE: Final = 120.0
_SECONDS_BETWEEN_COMMITS: Final = 1.0
_PICTURES_BETWEEN_COMMITS: Final = 1024


def prepare(
    rules: SiteRules,
    *,
    size: int,
    channels: int = 1,
    classes: Sequence[str] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Makes, or brings up to date, a site's cached pictures.

    Args:
        rules: of the site.
        size: height and width of the pictures.
        channels: 1 refuses images in colour, 3 gives grey ones three equal channels.
        classes: labels to keep; images with others are refused. All of them when not given.
        processes: workers; as many as there are processors when not given, 0 works in this process.
        progress: called as progress(what, done, in all).

    Raises:
        BadInput: the rules cannot be followed, or another process is at work in the cache.
        StorageFailure: disk full, or not to be written; what was prepared before is kept.
    """
    _check_options(size=size, channels=channels, classes=classes)
    with held(rules.cache):
        asked = asked_digests(rules.path, rules.labels.file)
        inventory = scan(rules.data, state=rules.cache, processes=processes, progress=progress)
        files = [found for found in inventory.files if not _is_own(rules, found)]
        choice = choose(
            rules,
            files,
            secret=site_secret(rules.cache / SECRET),
            classes=classes,
            processes=processes,
            progress=progress,
        )
        site = _Site(rules, size=size, channels=channels, processes=processes, progress=progress)
        outcome = site.outcome(choice)
        phantom = is_phantom(rules.data)
        manifest = Manifest(size=size, channels=channels, asked=asked, seen=len(files), phantom=phantom, **outcome)
        manifest.write(site.cache.folder)
        site.tidy(choice)
    return manifest


def _check_options(*, size: int, channels: int, classes: Sequence[str] | None) -> None:
    if size < SMALLEST_SIZE:
        raise BadInput(f"images of {size} pixels are too small to learn from; choose a size of {SMALLEST_SIZE} or more")
    if channels not in (1, 3):
        raise BadInput(f"pictures with {channels} channels cannot be made; choose 1 or 3")
    if classes is not None and len(set(classes)) < max(2, len(classes)):
        raise BadInput("classes: give two or more, each once")


def _is_own(rules: SiteRules, found: Found) -> bool:
    """Whether a file is the site's own paper, not one of its images."""
    return (rules.data / found.path) in (rules.path, rules.labels.file)


class _Site:
    """The work on one site's cache."""

    def __init__(
        self, rules: SiteRules, *, size: int, channels: int, processes: int | None, progress: Progress | None
    ) -> None:
        self._rules = rules
        self._size, self._channels = size, channels
        self._processes, self._progress = processes, progress
        self.cache = Cache(folder_of(rules.cache, size=size, channels=channels), channels=channels, size=size)
        private_folder(rules.cache)
        self._known = KnownFiles(Lines(rules.cache / "files"))
        self._learned = Lines(rules.cache / "learned")
        self._sha256: dict[str, str] = {}
        self._failed: dict[str, Refused] = {}
        self._damaged = self.cache.verify()

    def outcome(self, choice: Choice) -> dict[str, Any]:
        """Everything of a manifest that depends on the pixels."""
        self._recognise(choice.candidates)
        fitted = self._fit(choice.candidates)
        digests = {domain: self._digest(domain, learned) for domain, learned in fitted.items()}
        ready = [candidate for candidate in choice.candidates if candidate.domain in fitted]
        self._make(ready, fitted, digests)
        accepted, refused = self._sorted_out(choice.candidates, digests)
        self.cache.keep_only([key for candidate in ready for key in self._keys(candidate, digests)])
        pictures = tuple(self._pictures(accepted, digests))
        rejected = [Rejected(file=file, reason=why.reason, detail=why.detail) for file, why in refused.items()]
        return {
            "pixels": self.cache.pixels,
            "left_out": choice.left_out,
            "pictures": pictures,
            "rejected": tuple(sorted([*choice.rejected, *rejected], key=lambda row: row.file)),
            "transforms": digests,
            "styles": self._styles(pictures),
            "warnings": (*choice.warnings, *self._repaired(), *_twins(pictures)),
        }

    def tidy(self, choice: Choice) -> None:
        """Remove what the new manifest has no use for."""
        self.cache.clear_leftovers()
        self._known.keep_only([candidate.file for candidate in choice.candidates])

    def _recognise(self, candidates: Sequence[Candidate]) -> None:
        """Find the hashes of files that were read before, also under another name."""
        sizes = {stamp.size for stamp, _ in self._known.entries.values()}
        moved = []
        for candidate in candidates:
            try:
                stamp = Stamp.of(self._rules.data / candidate.file)
            except Refused as gone:
                self._failed[candidate.file] = gone
                continue
            known = self._known.entries.get(candidate.file)
            if known is not None and known[0] == stamp:
                self._sha256[candidate.file] = known[1]
            elif stamp.size in sizes:
                moved.append(candidate.file)
        for _ in self._worked("looking for known files", Hashing(self._rules.data), moved, moved):
            pass

    def _fit(self, candidates: Sequence[Candidate]) -> dict[str, Fitted]:
        """What the steps of every domain learn from its training images; none for a domain that has no such images."""
        fitters = {domain: Fitter(self._rules.steps(domain)) for domain in sorted({each.domain for each in candidates})}
        fitted = {domain: Fitted() for domain, fitter in fitters.items() if not fitter.needed}
        learning = {
            domain: _sample([each for each in candidates if each.domain == domain and each.part == TRAIN])
            for domain, fitter in fitters.items()
            if fitter.needed
        }
        before = {key: Fitted.from_json(content) for key, content in self._learned.read()}
        for domain, sample in learning.items():
            if (key := self._lesson_key(domain, sample)) in before:
                fitted[domain] = before[key]
        todo = [each for domain, sample in learning.items() if domain not in fitted for each in sample]
        lesson = Lesson(self._rules.data, {domain: fitters[domain] for domain in learning})
        wanted = [Wanted(each.file, each.domain, each.frames) for each in todo]
        domains = {each.file: each.domain for each in todo}
        for file, made in self._worked("learning", lesson, wanted, [each.file for each in todo]):
            if not any(isinstance(result, Refused) for result in made.results):
                for summary in made.results:
                    fitters[domains[file]].take(summary)
        self._known.commit()
        for domain in learning.keys() - fitted.keys():
            try:
                fitted[domain] = fitters[domain].fitted()
            except BadInput:
                continue
            if key := self._lesson_key(domain, learning[domain]):
                self._learned.append([[key, fitted[domain].as_json()]])
        return fitted

    def _lesson_key(self, domain: str, sample: Sequence[Candidate]) -> str:
        """What a lesson depends on; empty where not all of it is known yet."""
        if not all(each.file in self._sha256 for each in sample):
            return ""
        steps = [asdict(step) | {"line": 0} for step in self._rules.steps(domain)]
        return _hash([transforms.VERSION, steps, sorted([self._sha256[each.file], *each.frames] for each in sample)])

    def _digest(self, domain: str, fitted: Fitted) -> str:
        steps = transforms.digest(self._rules.steps(domain), fitted, self._size, self._channels)
        return _hash([crossward.__version__, steps, self._rules.burned_in])

    def _make(self, candidates: Sequence[Candidate], fitted: Mapping[str, Fitted], digests: Mapping[str, str]) -> None:
        todo = [each for each in candidates if not self._is_done(each, digests)]
        pipelines = {
            domain: transforms.pipeline(self._rules.steps(domain), learned, size=self._size, channels=self._channels)
            for domain, learned in fitted.items()
        }
        recipe = Recipe(self._rules.data, pipelines, look_for_text=self._rules.burned_in == "refuse")
        wanted = [Wanted(each.file, each.domain, each.frames) for each in todo]
        by_file = {each.file: each for each in todo}
        waiting, committed = 0, time.monotonic()
        for file, made in self._worked("pictures", recipe, wanted, list(by_file)):
            for key, result in zip(self._keys(by_file[file], digests), made.results, strict=False):
                self.cache.add(key, result)
                waiting += 1
            if waiting >= _PICTURES_BETWEEN_COMMITS or time.monotonic() - committed > _SECONDS_BETWEEN_COMMITS:
                self._commit()
                waiting, committed = 0, time.monotonic()
        self._commit()

    def _commit(self) -> None:
        self.cache.commit()
        self._known.commit()

    def _worked(
        self, what: str, function: Any, items: Sequence[Any], files: Sequence[str]
    ) -> Iterator[tuple[str, Made]]:
        """Work on files; those that fail in passing are noted, and asked again by the next run."""
        results = work(function, items, processes=self._processes, seconds=_SECONDS_PER_FILE)
        for done, (number, result) in enumerate(results, start=1):
            file = files[number]
            if isinstance(result, Refused):
                self._failed[file] = result
            else:
                self._failed.pop(file, None)
                self._known.add(file, result)
                self._sha256[file] = result.sha256
                yield file, result
            if self._progress is not None:
                self._progress(what, done, len(items))

    def _keys(self, candidate: Candidate, digests: Mapping[str, str]) -> list[Key]:
        sha256 = self._sha256.get(candidate.file, "")
        return [(sha256, frame, digests[candidate.domain]) for frame in candidate.frames]

    def _is_done(self, candidate: Candidate, digests: Mapping[str, str]) -> bool:
        for key in self._keys(candidate, digests):
            if key not in self.cache:
                return False
            if isinstance(self.cache[key], Refused):
                return True
        return True

    def _sorted_out(
        self, candidates: Sequence[Candidate], digests: Mapping[str, str]
    ) -> tuple[list[Candidate], dict[str, Refused]]:
        """Files that became pictures, and why the others did not."""
        accepted: list[Candidate] = []
        refused: dict[str, Refused] = {}
        for each in candidates:
            why = self._refusal(each, digests)
            if why is None:
                accepted.append(each)
            else:
                refused[each.file] = why
        same: defaultdict[str, list[Candidate]] = defaultdict(list)
        for each in accepted:
            same[self._sha256[each.file]].append(each)
        for copies in same.values():
            # Copies that contradict one another are all refused; of others the first is kept.
            clash = len({each.label for each in copies}) > 1 and Refused(Reason.CONFLICTING_LABELS)
            strange = len({each.patient for each in copies}) > 1 and Refused(Reason.NO_PATIENT)
            for each in copies if clash or strange else copies[1:]:
                refused[each.file] = clash or strange or Refused(Reason.DUPLICATE)
        return [each for each in accepted if each.file not in refused], refused

    def _refusal(self, candidate: Candidate, digests: Mapping[str, str]) -> Refused | None:
        if candidate.file in self._failed:
            return self._failed[candidate.file]
        if candidate.domain not in digests:
            return Refused(Reason.TRANSFORM, "its domain has no training images to learn from")
        for key in self._keys(candidate, digests):
            if isinstance(entry := self.cache[key], Refused):
                return entry
        return None

    def _pictures(self, candidates: Sequence[Candidate], digests: Mapping[str, str]) -> Iterator[Picture]:
        for each in candidates:
            for frame, key in zip(each.frames, self._keys(each, digests), strict=True):
                kept = self.cache[key]
                assert isinstance(kept, Kept)
                yield Picture(
                    file=each.file,
                    frame=frame,
                    patient=each.patient,
                    label=each.label,
                    part=each.part,
                    domain=each.domain,
                    record=kept.record,
                    checksum=kept.checksum,
                )

    def _styles(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Statistics of finished training pictures, for domains whose pictures are augmented."""
        pages = self.cache.pages()
        found: dict[str, Any] = {}
        for domain in sorted({each.domain for each in pictures}):
            if not augmentation(self._rules, domain):
                continue
            statistics = DomainStatistics()
            for each in _sample([each for each in pictures if each.domain == domain and each.part == TRAIN]):
                levels = pages.take(*places([Kept(each.record, each.checksum)]))[0]
                statistics.take(measure_picture(pixels_in(levels)))
            found[domain] = statistics.as_json()
        return found

    def _repaired(self) -> list[str]:
        return [f"{self._damaged} cached pictures were damaged, and were made anew"] if self._damaged else []


def _sample(of: Sequence[Any]) -> list[Any]:
    """So many at most, by a hash of their files, so that a few new ones hardly change who is among them."""
    return sorted(of, key=lambda each: _hash(each.file))[:LEARNED_FROM]


def _twins(pictures: Sequence[Picture]) -> list[str]:
    """Warn of pictures of two patients that look the same: one of them may be tested with what it was trained on."""
    owners: defaultdict[int, set[str]] = defaultdict(set)
    for each in pictures:
        owners[each.checksum].add(each.patient)
    count = sum(len(patients) > 1 for patients in owners.values())
    return [f"{count} pictures are the same under two patients: look for copies with another id"] if count else []


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
