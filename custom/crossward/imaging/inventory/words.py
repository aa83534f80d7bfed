"""An inventory's facts in words: the same rows for a terminal and for a page."""

from __future__ import annotations

from crossward.imaging.inventory.facts import Counts, Facts, Range, Scanner

Rows = list[tuple[str, str]]

_SHOWN = 6


def overview(facts: Facts) -> Rows:
    """What there is, one row per question; questions that nothing answers are left out."""
    rows = [
        ("files", f"{facts.files:,} ({_bytes(facts.bytes)})"),
        ("DICOM files read", f"{facts.read:,}, of which {facts.images:,} have pixel data"),
        ("patients, studies, series", f"{facts.patients:,}, {facts.studies:,}, {facts.series:,}"),
        ("modalities", counts_in_words(facts.modalities)),
        ("kinds of object", counts_in_words(facts.objects)),
        ("transfer syntaxes", counts_in_words(facts.syntaxes)),
        ("photometric interpretations", counts_in_words(facts.photometrics)),
        ("bits stored of allocated", counts_in_words(facts.bits)),
        ("frames", counts_in_words(facts.frames)),
        ("view positions", counts_in_words(facts.views)),
        ("burned-in annotation", counts_in_words(facts.burned_in)),
        (
            "same pixels under other UIDs",
            "not looked for" if facts.repeats.twins is None else f"{facts.repeats.twins:,}",
        ),
    ]
    return [(question, answer) for question, answer in rows if answer]


def scanner_rows(scanner: Scanner) -> Rows:
    """What is known of one scanner."""
    rows = [
        ("images", f"{scanner.images:,} of {scanner.patients:,} patients, {scanner.studies:,} studies"),
        ("single machines", f"{scanner.devices:,}" if scanner.devices else ""),
        ("stations", f"{scanner.stations:,}" if scanner.stations else ""),
        ("modality", counts_in_words(scanner.modalities)),
        ("software", counts_in_words(scanner.software)),
        ("tube voltage", range_in_words(scanner.kvp, "kV")),
        ("field strength", range_in_words(scanner.field_strength, "T")),
        ("kernel", counts_in_words(scanner.kernels)),
        ("spacing", range_in_words(scanner.spacing, "mm")),
        ("rows x columns", counts_in_words(scanner.sizes)),
        ("photometric interpretation", counts_in_words(scanner.photometrics)),
        ("bits stored of allocated", counts_in_words(scanner.bits)),
    ]
    return [(question, answer) for question, answer in rows if answer]


def cautions(facts: Facts) -> list[str]:
    """What a person should look into before training."""
    repeats = facts.repeats
    found = {
        "patient ids that more than one person uses, whose files are not to be trained on": facts.clashes,
        "files that do not say whose they are": facts.without_patient,
        "files that are copies of others": repeats.copies,
        "SOP instance UIDs with different pixel data (compressed anew, or two images under one UID)": (
            repeats.contradictions
        ),
        "images with the very pixels of another image": repeats.twins,
        "images that say that text is burned into their pixels": facts.burned_in.get("YES"),
    }
    return [f"{words}: {count:,}" for words, count in found.items() if count]


def counts_in_words(counts: Counts) -> str:
    """The most frequent with how often they occur."""
    shown = [f"{term} ({count:,})" for term, count in list(counts.items())[:_SHOWN]]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"{more:,} more"] if more else [])])


def range_in_words(values: Range | None, unit: str) -> str:
    """One number where there is one."""
    if values is None:
        return ""
    low, high = (f"{value:.4g}" for value in values)
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
