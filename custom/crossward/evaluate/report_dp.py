"""Differential privacy of a run in words for a privacy officer: what was asked, what it covers, and against whom.

Between hospitals the server knows what the job asked for, and no more: what a hospital spent is in its own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Settings = Mapping[str, Any]
"""What a result says about differential privacy (``Study.privacy_facts``)."""

_LIMIT = (
    "Noise limits what anyone can learn about {whom} from all that was sent, in all rounds together. Epsilon measures "
    "the limit: whatever is found out is at most exp(epsilon) times as likely with {it} as without, but for a chance "
    "of delta. Smaller is safer."
)
_WHOM = {
    "patient": ("a single patient, with all images", "the patient"),
    "image": ("a single image", "the image"),
    "site": ("what one hospital has at all", "the hospital's images"),
}
_COUNTED = (
    "Everything worked out from images that leaves a hospital: the update of every round, class prototypes and styles "
    "where the method has them, right answers on validation images in every round, and on test images once."
)
_COVERED = {
    "patient": _COUNTED,
    "image": _COUNTED,
    "site": "Everything that leaves a hospital: its update in every round. No count of images leaves it at all.",
}
_AND_SO = "Who took part, when, and that a hospital could not go on is seen by everybody"
_STAYS = "Scores in a hospital's own files are exact"
_OPEN = {
    "patient": f"The numbers of patients in training, validation and test count as public. {_AND_SO}. {_STAYS}.",
    "image": f"The numbers of images in training, validation and test count as public, and a patient with several "
    f"images is protected less. {_AND_SO}. {_STAYS}.",
    "site": f"A single patient is protected less than the hospital: by an epsilon of half the noise. {_AND_SO}. "
    f"{_STAYS}.",
}
_LOOK = (
    "In each hospital's ledger, which counts all its runs together: crossward ledger show state/ledger says what was "
    "spent, with which noise, and what is left of the hospital's budget. Attacks that were tried: crossward audit."
)


def dp_in_words(privacy: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Headings and what is to be said under them.

    Args:
        privacy: of a result, with differential privacy on.
    """
    settings: Settings = privacy["dp"] if isinstance(privacy["dp"], Mapping) else {}
    unit = settings.get("unit", "patient")
    whom, it = _WHOM[unit]
    yield "Differential privacy", _LIMIT.format(whom=whom, it=it)
    if settings:
        yield "Asked for", _asked(settings)
    yield "Epsilon spent", spent_in_words(privacy)
    yield "Covered", _COVERED[unit]
    yield "Not covered", _OPEN[unit]
    yield "Against whom", against_in_words(settings)
    yield "Where to look", _LOOK


def spent_in_words(privacy: Mapping[str, Any]) -> str:
    """What every hospital spent in this run, or at most could."""
    settings: Settings = privacy["dp"] if isinstance(privacy["dp"], Mapping) else {}
    asked, known = settings.get("epsilon"), privacy["epsilon"] or {}
    told = [
        f"{site} {value:.2f}" + (f" ({max(asked - value, 0.0):.2f} left)" if asked else "")
        for site, value in known.items()
        if value is not None
    ]
    if told and len(told) == len(known):
        return f"{', '.join(told)}."
    others = "every other hospital" if told else "every hospital"
    if asked:
        told.append(f"at most {asked:.2f} at {others}, by the job; what each spent is in its ledger")
    elif settings:
        cause = "the number of rounds" if settings["unit"] == "site" else f"its number of {settings['unit']}s"
        told.append(f"at {others} it follows from {cause}, and is in its ledger")
    else:
        told.append("not recorded here")
    return f"{', '.join(told)}."


def against_in_words(settings: Settings) -> str:
    """From whom the promise protects."""
    shared = settings.get("shared")
    if not shared:
        return "The server, any other hospital, and whoever sees everything that was sent or made of it."
    others, each = shared["colluders"], "hospital" if shared["colluders"] == 1 else "hospitals"
    return (
        f"Hospitals share the noise of a sum. Epsilon is at most {shared['epsilon']:.2f} against the server together "
        f"with up to {others} other {each}, and {shared['epsilon_server_alone']:.2f} against the server alone. An "
        "update without its masks would have less noise than that."
    )


def _asked(settings: Settings) -> str:
    limit = f"What one {settings['unit']} adds is cut to a length of {settings['clip']:g}"
    delta = f"delta {settings['delta']:g} (1 in {1 / settings['delta']:,.0f})"
    if settings["epsilon"] is None:
        return f"{limit}, and noise of {settings['noise']:g} times that length is added; {delta}."
    return (
        f"Epsilon at most {settings['epsilon']:.2f} for the whole run at {delta}. {limit}, and each hospital works out "
        "the noise that this takes."
    )
