"""How a site's uncertainty changes with training: a run in this process, looked at after every round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from crossward.cli.bench_uncertainty import NOISE, compare, signals, spread
from crossward.cli.bench_variants import Variant
from crossward.cli.progress import RoundDisplay
from crossward.evaluate.facts import write_result
from crossward.evaluate.metrics import across_domains
from crossward.federation.errors import BadInput
from crossward.federation.seeds import derive
from crossward.federation.storage import read_json, read_tensors, write_json
from crossward.imaging.data import Cohort
from crossward.site.devices import Device
from crossward.site.diagnostics import noised
from crossward.site.inprocess import Event, simulate
from crossward.site.runfolder import DESCRIPTION
from crossward.site.study import Study
from crossward.site.trainer import predict, refreshed

TRACE = "trace.json"


class Tracer:
    """Listens to a run; after every round it asks the model that each site would use, on clean and noised test images.

    What it found is kept in the run's folder, so that a resumed run has the rounds before too.
    """

    def __init__(self, cohort: Cohort, study: Study, folder: Path, *, noise: float) -> None:
        self._cohort, self._study, self._folder = cohort, study, folder
        self._noise = noise
        self._model = study.model()
        self._device = Device.best().take(self._model)
        path = folder / TRACE
        known: dict[str, Any] = read_json(path) if path.exists() else {"noise": noise, "rounds": []}
        if known["noise"] != noise:
            raise BadInput(f"{folder} was traced with --noise {known['noise']} and not {noise}; use the same")
        self._rounds: dict[int, dict[str, Any]] = {entry["round"]: entry for entry in known["rounds"]}

    @property
    def facts(self) -> dict[str, Any]:
        """All rounds so far: per site the figures of clean against noised images."""
        rounds = [self._rounds[number] for number in sorted(self._rounds)]
        return {"method": self._study.method.name, "noise": self._noise, "rounds": rounds}

    def __call__(self, event: Event) -> None:
        if event.kind == "aggregated":
            number = event.round_number
            sites = {name: self._figures(name, number) for name in self._cohort.sites}
            self._rounds[number] = {"round": number, "sites": sites}
            write_json(self._folder / TRACE, self.facts)

    def _figures(self, site: str, number: int) -> dict[str, Any]:
        vault = self._folder / "sites" / site / "vault"
        self._model.load_state_dict(read_tensors(vault / f"model-{number:04d}.safetensors")[0])
        data, seed = self._cohort.sites[site], self._study.training.seed
        model = refreshed(self._model, data.train, device=self._device, seed=derive(seed, site, "refresh"))
        clean, odd = (
            signals(predict(model, self._study.method, split, device=self._device))
            for split in (data.test, noised(data.test, self._noise, seed=derive(seed, site, NOISE)))
        )
        return compare(clean, odd)


def run(
    cohort: Cohort,
    variant: Variant,
    out: Path,
    *,
    rounds: int,
    seed: int,
    noise: float,
    jobs: int | None,
    console: Console,
) -> dict[str, Any]:
    """Train, or go on with the run in the folder, and give the trace."""
    study = variant.study(cohort, rounds=rounds, seed=seed)
    tracer = Tracer(cohort, study, out, noise=noise)
    with RoundDisplay(console, rounds=rounds, sites=len(cohort.sites)) as display:

        def listen(event: Event) -> None:
            display(event)
            tracer(event)

        result = simulate(cohort, study, out, resume=(out / DESCRIPTION).exists(), jobs=jobs, listen=listen)
    write_result(out / "result.json", result)
    return tracer.facts


def table(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per round; in every site's column the mean uncertainty clean and noised, and the AUROC between them."""
    return [{"round": entry["round"], **_cells(entry["sites"])} for entry in facts["rounds"]]


def _cells(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    triples = {name: (*each["uncertainty"], each["auroc"]["uncertainty"]) for name, each in sites.items()}
    average = tuple(across_domains(column)[0] for column in zip(*triples.values(), strict=True))
    return {
        name: " / ".join(spread([value]) for value in triple)
        for name, triple in {**triples, "average": average}.items()
    }
