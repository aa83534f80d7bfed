"""Everything that the server receives in whole runs on real FLARE, searched for what sites must keep; and the accuracy.

    python -m tests.flare.record_poc --method fedavg --out FOLDER

runs four small phantom hospitals under secure aggregation. Of a run without it (--no-secagg) the same search has to
find what it looks for, so that it can be trusted where it finds nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from crossward.federation.storage import read_json
from crossward.flare.jobs import federated_methods
from crossward.privacy.secagg.settings import Settings
from tests.flare.faults import settle
from tests.flare.real import Hospitals, hospitals_in, small_study
from tests.flare.recording import Matches, Recording, Secret, forget, labels_of, scores_of, search

_SITES = [f"hospital-{letter}" for letter in "abcd"]
_SOUGHT = ("float32", "float64", "numbers", "decoded", "texts", "labels", "correlated")


def main(
    out: Annotated[Path, typer.Option(help="An empty folder; gets the system and one folder of records per method.")],
    method: Annotated[str, typer.Option(help="One method, or 'all'.")] = "all",
    rounds: Annotated[int, typer.Option()] = 3,
    secagg: Annotated[bool, typer.Option()] = True,
) -> None:
    """Run, record, search, and print two lines per method; the exit code is 1 where the search says the wrong thing."""
    record, wrong = out.absolute() / "recording", False
    heading = f"{'method':10} {'seconds':>8} {'bytes':>12} {'answers':>8} {'arrays':>7}"
    print(heading, " found / sought:", *_SOUGHT, flush=True)
    with hospitals_in(out.absolute() / "run", sites=_SITES, secure_aggregation=secagg, record=record) as hospitals:
        for name in federated_methods() if method == "all" else [method]:
            began = time.monotonic()
            run = _run(hospitals, name, rounds=rounds, secagg=secagg)
            kept = out.absolute() / name
            shutil.copytree(record, kept)
            forget(record)
            recording = Recording.read(kept)
            results = {site: read_json(hospitals.run_folder(site, run) / "result.json") for site in _SITES}
            matches = search(recording, [each for site in _SITES for each in _secrets(site, results[site], hospitals)])
            counts = f"{len(recording.received):12,} {len(recording.answers):8} {len(recording.arrays):7}"
            found = " ".join(f"{getattr(matches, part)[0]}/{getattr(matches, part)[1]}" for part in _SOUGHT)
            print(f"{name:10} {time.monotonic() - began:8.0f} {counts}  {found}", flush=True)
            print(_figures(name, recording, matches, [result["accuracy"] for result in results.values()]), flush=True)
            wrong |= not (_nothing(matches) if secagg else _everything(matches))
    raise typer.Exit(int(wrong))


def _run(hospitals: Hospitals, method: str, *, rounds: int, secagg: bool) -> str:
    study = small_study(method, hospitals.cohort, rounds=rounds)
    outcome, _ = hospitals.run(study.masked(Settings()) if secagg else study)
    if outcome.status != "completed":
        raise RuntimeError(f"{method}: {outcome.reason}")
    settle(hospitals)
    return outcome.run


def _secrets(site: str, result: Mapping[str, Any], hospitals: Hospitals) -> list[Secret]:
    """What a site knows beside what it reported: how good its model is, and how many images of each class it has."""
    cohort = hospitals.cohort
    labels = labels_of(site, cohort.classes, cohort.sites[site].train.labels.tolist())
    if sum(labels.labels.values()) != result["n_train"]:
        raise RuntimeError(f"{site} trained on other images than those whose labels are looked for")
    return [scores_of(site, result), labels]


def _figures(name: str, recording: Recording, matches: Matches, accuracies: Sequence[float]) -> str:
    """The figures that the documents give, in a sentence."""
    sought, found = matches.sought(), sum(matches.found().values())
    return (
        f"{name}: {len(recording.received):,} bytes received, searched for {sought['float32']:,} pieces of updates, "
        f"{sought['numbers']} numbers and {sought['labels']} ways of writing label counts, and held against "
        f"{sought['correlated']} vectors: {found} matches; average accuracy {mean(accuracies):.3f}"
    )


def _nothing(matches: Matches) -> bool:
    return not any(matches.found().values())


def _everything(matches: Matches) -> bool:
    """Without masks updates travel as float32, and counts as arrays of float64; there are no decimal texts."""
    (pairs, all_pairs), (numbers, all_numbers), (decoded, _) = matches.float32, matches.numbers, matches.decoded
    return pairs == all_pairs and numbers == decoded == all_numbers and matches.correlated[0] > 0


if __name__ == "__main__":
    typer.run(main)
