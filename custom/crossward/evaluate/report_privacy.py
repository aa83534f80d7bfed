"""The report's page on protection: what the server could see, in words for a privacy officer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossward.evaluate.masked_differences import over_rounds
from crossward.evaluate.plots import Html, join, tag
from crossward.evaluate.report_dp import dp_in_words
from crossward.evaluate.table import percent

_SECAGG_ON = "The server saw only the sum of the hospitals' contributions, never one hospital's own."
_SECAGG_OFF = "The server could read every hospital's update. An update can give away facts about the images behind it."
_DP_OFF = "No mathematical limit was set on what the model or the updates tell about a single patient."
_MEASURED = {
    "shared/cosines": "cosines of updates are off",
    "shared/weights": "weights of updates",
    "personal/cosines": "cosines of personal tensors",
    "personal/attention": "parts of mixtures",
}
_SCANS = "No scan is part of a round: hospitals send model updates and counts."


def privacy_page(result: Mapping[str, Any]) -> Html:
    """What was protected, and what the protection cost."""
    privacy = result["privacy"]
    entries = [("Scans", join(_SCANS)), ("Secure aggregation", _stated(privacy["secagg"], _SECAGG_ON, _SECAGG_OFF))]
    if privacy["secagg"]:
        entries += _sums(result)
    (title, limit), *more = dp_in_words(privacy) if privacy["dp"] else [("Differential privacy", "")]
    entries.append((title, _stated(privacy["dp"], limit, _DP_OFF)))
    entries += [(heading, join(words)) for heading, words in more]
    listed = [part for title, content in entries for part in (tag("dt", title), tag("dd", content))]
    return join(tag("h2", "What was protected"), tag("dl", *listed))


def _sums(result: Mapping[str, Any]) -> list[tuple[str, Html]]:
    rounds = [entry["secagg"] for entry in result["rounds"] if "secagg" in entry]
    sizes = sorted({len(entry["sites"]) for entry in rounds})
    if not sizes:
        return []
    number = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    least = result["privacy"].get("fewest_sites")
    limit = f" A sum over fewer than {least} would not have been opened." if least else ""
    found = [("Sums", join(f"Every round's sum was over {number} hospitals.{limit}"))]
    tested = result["privacy"].get("test") or {}
    if tested.get("n"):
        share = percent(tested["accuracy"], tested["interval"])
        found.append(("Tested together", join(f"{share} % right on all {tested['n']:.0f} test images.")))
    found.append(("Difference from adding in the open", join(" ".join(_differences(result, rounds)))))
    return found


def _differences(result: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """By how much the model can differ from one whose server saw everything."""
    masking = (result.get("options") or {}).get("masking") or {}
    found = over_rounds(result["rounds"])
    cut = found["cut_off"]
    words = [f"Products are rounded to whole numbers of {masking.get('bits', 32)} bits."]
    words.append(f"{cut:.0f} values were cut off at the end of their range." if cut else "No value was cut off.")
    sketches = max(entry.get("sketches") or 0 for entry in rounds)
    if sketches:
        words.append(
            f"Hospitals were compared by {sketches} sketches instead of exactly{_off_by(found['sketch_error'])}."
        )
    if found["capped"] is not None:
        words.append(
            f"No hospital may dominate a sum: limits took away up to {percent(found['capped'])} % of a block's weight."
        )
    return words + _kept_back(found["bounds"])


def _off_by(errors: Mapping[str, float]) -> str:
    """What sketches brought, as it was measured by their halves."""
    said = [
        f"{_MEASURED.get(name, name)} by {f'about {error:.3f}' if error >= 0.0005 else 'less than 0.001'}"
        for name, error in errors.items()
    ]
    return f": measured in this run, {', '.join(said)}" if said else ""


def _kept_back(bounds: Mapping[str, float]) -> list[str]:
    """What was not made of too few hospitals."""
    words = []
    if "style/groups" in bounds:
        groups, plain = bounds["style/groups"], bounds["style/plain_groups"]
        words.append(
            f"Groups of too few hospitals joined others: {groups:.0f} style groups of all rounds together, where there "
            f"would have been {plain:.0f}."
            if groups < plain
            else "No style groups were joined for being of too few hospitals."
        )
    if "prototypes/withheld" in bounds:
        withheld = bounds["prototypes/withheld"]
        words.append(
            f"{withheld:.0f} times a class had no new prototype in a round, because too few hospitals hold it."
            if withheld
            else "No prototype was withheld because too few hospitals hold the class."
        )
    return words


def _stated(on: Any, yes: str, no: str) -> Html:
    return join(tag("span", "ON" if on else "OFF", class_="state on" if on else "state"), yes if on else no)
