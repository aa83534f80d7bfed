"""The closed list of what can go wrong at a site or at the server: a code and numbers travel, never free text.

The words are made where a person reads them, from the code and the numbers. Numbers that travel are settings: of the
job, of a site's policy, or what the server itself counted. Figures worked out from a site's data are for that site's
own log: they never travel, with masks or without. What else is known about a failure stays there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from crossward.federation.errors import CrosswardError


class Code(IntEnum):
    """Numbers are part of the protocol: they are never reused for something else (34 was another word for 14)."""

    VERSION = 10
    STUDY = 11
    NO_DATA = 12
    UNREADABLE_DATA = 13
    LABELS = 14
    TOO_FEW_IMAGES = 15
    POLICY = 16
    BUSY = 17
    DATA_CHANGED = 18
    NOT_PREPARED = 19
    DIVERGED = 20
    MEMORY = 21
    INTERNAL = 22
    BAD_TASK = 23
    OPEN_JOB = 24
    SMALL_SUMS = 25
    NOT_MASKED = 26
    MASKED_BEFORE = 27
    NO_CERTIFICATE = 28
    NO_KEYS = 29
    DISK_FULL = 30
    STORAGE = 31
    OTHER_VAULT = 32
    TRUSTING_JOB = 33
    NO_PRIVACY = 35
    WEAK_PRIVACY = 36
    LARGE_DELTA = 37
    LITTLE_NOISE = 38
    BUDGET = 39
    NO_ANSWER = 40
    NOT_EXECUTED = 41
    QUORUM = 42
    SERVER_DISK_FULL = 43
    SERVER_STORAGE = 44
    SERVER_INTERNAL = 45
    NOT_RESUMABLE = 46
    ABORTED = 47
    NO_SUM = 48
    CAUGHT = 49
    GATE = 50
    NOT_DECLARED = 51
    DISPUTED = 52
    QUARREL = 53
    OUTLIER = 54
    LEDGER = 60
    NOT_PRIVATE = 61
    OTHER_UNIT = 62
    LARGE_EPSILON = 63
    LEARNED_PICTURES = 64
    LONG_RUN = 65
    NO_PRICE = 66
    KEPT_PAYLOAD = 67
    LEFT_JOB = 68


@dataclass(frozen=True)
class _Words:
    """What is said for a code.

    Attributes:
        cause: with the settings in it.
        remedy: what to do.
        settings: names of numbers that may travel.
        detail: with the figures in it; said where they are known, which is at the site.
        figures: names of numbers that are worked out from the site's data and stay there.
    """

    cause: str
    remedy: str
    settings: tuple[str, ...] = ()
    detail: str = ""
    figures: tuple[str, ...] = ()


_SITE_LOG = "The site's own log has the details"

_WORDS: dict[Code, _Words] = {
    Code.VERSION: _Words(
        "the site runs another version of Crossward, or got another study than the server",
        "Install the server's version at the site, and submit the job to all sites again",
    ),
    Code.STUDY: _Words(
        "the site cannot build what the job asks for", f"Export the job with the installed version. {_SITE_LOG}"
    ),
    Code.NO_DATA: _Words(
        "the site has no data folder, or an empty one",
        "At the site: set data_root in local/privacy.json (or CROSSWARD_DATA) to the folder with labels.csv",
    ),
    Code.UNREADABLE_DATA: _Words(
        "the site's images or its labels.csv cannot be read", f"{_SITE_LOG}, with the line of labels.csv"
    ),
    Code.LABELS: _Words(
        "some of the site's images have a label that is not one of the job's classes",
        f"Correct labels.csv at the site, or export the job with all the classes. {_SITE_LOG}",
        detail="{unknown:.0f} of {images:.0f} images",
        figures=("unknown", "images"),
    ),
    Code.TOO_FEW_IMAGES: _Words(
        "the site has too few images to train and test on, or only one class", f"Add images. {_SITE_LOG}"
    ),
    Code.POLICY: _Words(
        "the site's policy does not allow the job",
        "The kit's local/privacy.json must define the scope 'crossward' with its gate; ask the site's administrator",
    ),
    Code.BUSY: _Words(
        "another job is using the state of the site or of the run",
        "Wait until that job has ended, then submit this one again",
    ),
    Code.DATA_CHANGED: _Words(
        "the site's images are not those the run was started with",
        "Start a new run, with another --seed under secure aggregation, or put the images back",
    ),
    Code.NOT_PREPARED: _Words(
        "the site's images are not prepared for this job, or its site.yaml or labels changed since they were",
        "At the site: crossward data prepare site.yaml, with the job's --size and --channels. "
        f"{_SITE_LOG}, with the whole command",
    ),
    Code.DIVERGED: _Words(
        "training diverged: the loss or the model is not finite any more",
        "Lower the learning rate or set a gradient clip in a new job; look for damaged images at the site, or, where "
        "none is named, at every site",
    ),
    Code.MEMORY: _Words("the site ran out of memory", "Use a smaller batch size, or give the site more memory"),
    Code.INTERNAL: _Words("the site met an unexpected error", f"{_SITE_LOG}; please report it"),
    Code.BAD_TASK: _Words("the server sent the site something that the study does not declare", _SITE_LOG),
    Code.OPEN_JOB: _Words(
        "the site's policy demands secure aggregation, and the job does not use it",
        "Export the job with --secagg; the rule is secure_aggregation in the site's local/privacy.json",
    ),
    Code.SMALL_SUMS: _Words(
        "the job would open sums over {sites:.0f} sites, and the site's policy wants at least {needed:.0f} in each",
        "Export the job with a larger --min-sum; the rule is minimum_sites in the site's local/privacy.json",
        ("sites", "needed"),
    ),
    Code.NOT_MASKED: _Words(
        "the site did not take a step of secure aggregation: a message of the server or of another site does not hold",
        f"{_SITE_LOG}. Nothing of the site's can be read without that step",
    ),
    Code.MASKED_BEFORE: _Words(
        "the site has masked something else for this model before, or the same update for another sum: in this run, "
        "in another one, or in another study that trains the same; for other sites, by another plan, or other ranges",
        "Resume with the same sites as then, or export the job with another --seed; two sums of one update that differ "
        "by a site would show that site's",
    ),
    Code.NO_CERTIFICATE: _Words(
        "the site's kit has no certificate and key to sign with, or they cannot be read",
        "Look for client.crt, client.key and rootCA.pem in the kit's startup folder",
    ),
    Code.NO_KEYS: _Words(
        "the site has no keys of this job any more: its process was started anew",
        "Nothing to do: all sites agree on new keys before the next round",
    ),
    Code.DISK_FULL: _Words(
        "the disk with the site's state is full; what was there before is untouched",
        "Free some space at the site, then resume the run",
    ),
    Code.STORAGE: _Words("the site's state cannot be read or written", f"{_SITE_LOG}, with the file's name"),
    Code.OTHER_VAULT: _Words(
        "the site's vault was written for another study or by another version; it is left as it is",
        "Start a new run, with another --seed under secure aggregation, or install the version that wrote it",
    ),
    Code.TRUSTING_JOB: _Words(
        "the job's secure aggregation reckons with no site that works together with the server",
        "Export the job anew: colluders is at least 1",
    ),
    Code.NO_PRIVACY: _Words(
        "the site's policy demands differential privacy with epsilon up to {allowed:g}, and the job does not use it",
        "Export the job with --dp EPSILON; the rule is max_epsilon in the site's local/privacy.json",
        ("allowed",),
    ),
    Code.WEAK_PRIVACY: _Words(
        "the job asks for epsilon {epsilon:g}, and the site's policy allows {allowed:g}",
        "Export the job with a smaller --dp; the rule is max_epsilon in the site's local/privacy.json",
        ("epsilon", "allowed"),
    ),
    Code.LARGE_DELTA: _Words(
        "the job asks for delta {delta:g}, and the site's policy allows {allowed:g}",
        "Export the job with a smaller --dp-delta; the rule is max_delta in the site's local/privacy.json",
        ("delta", "allowed"),
    ),
    Code.LITTLE_NOISE: _Words(
        "the job's noise multiplier is {noise:g}, and the site's policy wants at least {allowed:g}",
        "Export the job with a larger --dp-noise, or with --dp; the rule is min_noise in the site's local/privacy.json",
        ("noise", "allowed"),
    ),
    Code.BUDGET: _Words(
        "the round would take what is told of the site's patients past epsilon {limit:g}, which is the most",
        "The run ends here: what was finished can be used. A new job needs fewer rounds or a smaller --dp, or the "
        "site's administrator a larger max_epsilon. What is left shows at the site: crossward ledger show",
        ("limit",),
        detail="it would be {asked:.3g}, and {left:.3g} is left",
        figures=("asked", "left"),
    ),
    Code.LEDGER: _Words(
        "the site's privacy ledger is missing, cut off or changed, so that nothing may be spent",
        f"At the site: crossward ledger verify names the line. {_SITE_LOG}",
    ),
    Code.NOT_PRIVATE: _Words(
        "the site cannot train this job under differential privacy",
        f"Choose a method, head and net whose loss and layers keep images apart. {_SITE_LOG}",
    ),
    Code.OTHER_UNIT: _Words(
        "the job hides another unit (image, patient or site) than the site's policy wants or its ledger counts",
        "Export the job with the --dp-unit that the site's ledger counts (at the site: crossward ledger show); "
        "the rule is privacy_unit in the site's local/privacy.json. Where the two differ, the site's privacy officer "
        "decides",
    ),
    Code.LARGE_EPSILON: _Words(
        "with the job's epsilon there would be less noise in a step of training than the site's policy wants, which is "
        "{allowed:g} times the clip",
        "Export the job with a smaller --dp; the rule is min_noise in the site's local/privacy.json",
        ("allowed",),
    ),
    Code.LEARNED_PICTURES: _Words(
        "the site's site.yaml lets its pictures, or how they are varied in training, depend on all its images together",
        "At the site: give nyul its scale and every step of augment its most, take percentile instead of histogram, "
        f"and run crossward data prepare again. {_SITE_LOG}",
    ),
    Code.LONG_RUN: _Words(
        "all planned rounds, with what earlier jobs spent, would take what is told of the site's patients past epsilon "
        "{allowed:g}, which is the most for all jobs together",
        "Export the job with fewer rounds, a smaller --dp or a larger --dp-noise; the rule is max_epsilon in the "
        "site's local/privacy.json. At the site: crossward ledger show",
        ("allowed",),
    ),
    Code.NO_PRICE: _Words(
        "what the job would cost of the patients' privacy cannot be worked out at the site, or no noise is enough",
        f"Export the job with a larger --dp or --dp-noise, fewer rounds, and the usual --dp-delta. {_SITE_LOG}",
    ),
    Code.KEPT_PAYLOAD: _Words(
        "the job needs a kind of payload (update, personal, prototypes or counts) that the site's policy does not let "
        "out",
        "Export the job with a method that does without it (crossward methods says what each sends); the rule is "
        "payloads in the site's local/privacy.json",
    ),
    Code.LEFT_JOB: _Words(
        "the site has left the job: three times the server asked for a step of secure aggregation that was out of turn "
        "or did not hold",
        f"{_SITE_LOG}, each of the three by itself. Find out why the server asked; a new job starts afresh",
    ),
    Code.NO_ANSWER: _Words(
        "did not answer within {seconds:.0f} s; its work for this round is not used",
        "If it goes on: look whether the site's processes run and reach the server",
        ("seconds",),
    ),
    Code.NOT_EXECUTED: _Words("FLARE could not carry out the task at the site", _SITE_LOG),
    Code.QUORUM: _Words(
        "only {reports:.0f} of the {needed:.0f} reports that a round needs came in; finished rounds are kept",
        "Bring the missing sites back and resume the run",
        ("reports", "needed"),
    ),
    Code.SERVER_DISK_FULL: _Words(
        "the server's disk is full; finished rounds are kept", "Free some space at the server and resume the run"
    ),
    Code.SERVER_STORAGE: _Words("the server's state cannot be read or written", "The server's log names the file"),
    Code.SERVER_INTERNAL: _Words("the server met an unexpected error", "The server's log has it; please report it"),
    Code.NOT_RESUMABLE: _Words(
        "there is no such run to resume at the server, or it was started with another study",
        "Submit the job without resume, or with the options the run was started with",
    ),
    Code.ABORTED: _Words(
        "the job was ended from outside before it was finished; finished rounds are kept", "Resume the run to go on"
    ),
    Code.NO_SUM: _Words(
        "only {sites:.0f} sites were left for a sum that needs {needed:.0f}; finished rounds are kept",
        "Bring the missing sites back and resume the run; nothing is trained again",
        ("sites", "needed"),
    ),
    Code.OUTLIER: _Words(
        "round {round:.0f}: the sites' updates together are {times:.3g} times as long as in earlier rounds of "
        "theirs, and the job allows {most:g}; the round is not used, finished rounds are kept",
        "Find out what that site trained on, or, where none is named, every site; then start a new run with another "
        "--seed and without the site at fault, or with a larger --outlier if all is as it should be",
        ("round", "times", "most"),
    ),
    Code.GATE: _Words(
        "the site's gate stopped the answer: it held something that may not leave the site",
        "Nothing left. The site's journal and log name it; the site's software was changed or is faulty",
    ),
    Code.NOT_DECLARED: _Words(
        "the server refused the site's report: it is not what the study declares", "The server's log names it"
    ),
    Code.CAUGHT: _Words(
        "the site broke secure aggregation: what it signed contradicts itself, or what it committed to",
        "The sum goes on without the site where it can. The evidence is in the run's folder at the server; "
        "ask who runs the site. Where the run has ended, start a new run with another --seed and without the site",
    ),
    Code.DISPUTED: _Words(
        "the site stands against {sites:.0f} others, and what was shared between them for a sum does not hold: it "
        "lies, or those others do together",
        "The sum goes on without the site, which is asked again in the next round. The evidence is in the run's "
        "folder at the server, with the others' names; ask who runs the site, and who runs those",
        ("sites",),
    ),
    Code.QUARREL: _Words(
        "the site and one other quarrel about what they shared for a sum, and nobody else can tell which one is wrong",
        "The sum goes on without the two where enough are left; they are asked again in the next round. The evidence "
        "is in the run's folder at the server; ask who runs both sites",
    ),
}


SITE_CODES = frozenset(code for code in Code if code < Code.NO_ANSWER or code >= Code.LEDGER)
"""What a site may say of itself; the rest is what the server finds."""


def settings_of(code: Code) -> tuple[str, ...]:
    """The names of the numbers that may travel with a code."""
    return _WORDS[code].settings


def figures_of(code: Code) -> tuple[str, ...]:
    """The names of the numbers that belong to a code and stay at the site: they tell of its data."""
    return _WORDS[code].figures


def words(code: int, numbers: Mapping[str, float] | None = None) -> str:
    """What a code means and what to do about it, in plain words; an unknown code says so."""
    if code not in Code.__members__.values():
        return f"an unknown code ({code}). The other side may run a newer version"
    text, given = _WORDS[Code(code)], numbers or {}
    known = {name: float(given.get(name, float("nan"))) for name in (*text.settings, *text.figures)}
    detail = f" ({text.detail})" if text.figures and set(text.figures) <= given.keys() else ""
    return f"{(text.cause + detail).format(**known)}. {text.remedy}"


class Refusal(CrosswardError):
    """Something that a site or the server cannot do, with the code that says why.

    Args:
        code: from the closed list.
        site: whose it is, where that is not plain from the context.
        numbers: those that the code has words for.

    Attributes:
        numbers: those of them that may travel; the others are in the words alone.
        evidence: what shows it, and where that is kept; filled in by whoever found it, and it does not travel.
    """

    exit_code = 3

    def __init__(self, code: Code, *, site: str | None = None, **numbers: float) -> None:
        super().__init__(words(code, numbers))
        self.code = code
        self.site = site
        self.evidence = ""
        self.numbers = {name: float(numbers[name]) for name in settings_of(code) if name in numbers}
