"""A real FLARE system for tests: made-up hospitals, server and sites in processes of their own, over TLS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from crossward.federation.storage import read_tensors
from crossward.flare.console import Console
from crossward.flare.jobs import Timing, export
from crossward.flare.kits import SiteKit
from crossward.flare.system import LocalSystem
from crossward.flare.watch import Event, Outcome, Pace, follow
from crossward.imaging.data import Cohort, load
from crossward.imaging.phantom import write_hospitals
from crossward.imaging.pictures import pixels_of
from crossward.methods import Method, Task, create
from crossward.site.inprocess import simulate
from crossward.site.participant import Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training

SIZE = 16
BATCH = 8
WIDTH = 0.0625
SITES = ("hospital-a", "hospital-b", "hospital-c")
RECORDER = Path(__file__).parent / "recorder"
PACE = Pace(poll=0.3, process=6.0, settle=1.0)
TIMING = Timing(join=120, round=180, grace=6)

Action = Callable[[str], object]
"""Given the id of the job that runs."""

Moment = tuple[str, int]
"""Kind of an event and its round."""


@dataclass
class Hospitals:
    """A few small hospitals and the FLARE system around them.

    Attributes:
        folder: everything is in here.
        system: the running system.
        data: a folder of its own for every hospital, with its images.
        pack: the same images in one folder, for whoever plays all hospitals.
        cohort: the same images, for runs in this process.
    """

    folder: Path
    system: LocalSystem
    data: Path
    pack: Path
    cohort: Cohort
    _names: dict[str, int] = field(default_factory=dict)

    def job(self, study: Study, *, timing: Timing = TIMING) -> Path:
        """Write a job folder that no other test uses."""
        number = self._names.setdefault("job", 0)
        self._names["job"] = number + 1
        folder = self.folder / "jobs" / str(number)
        return export(study, folder, timing=timing, min_sites=max(2, study.quorum or 0))

    def run(
        self,
        study: Study,
        actions: Mapping[Moment, Action] | None = None,
        *,
        timing: Timing = TIMING,
        resume: bool = True,
    ) -> tuple[Outcome, list[Event]]:
        """Run a study as a job, doing something at certain moments."""
        with self.console() as console:
            return watched(console, self.job(study, timing=timing), actions or {}, resume=resume)

    @contextmanager
    def console(self) -> Iterator[Console]:
        with Console.open(self.system.admin_kit) as console:
            yield console

    def run_folder(self, site: str, run: str) -> Path:
        return self.system.state(site) / "runs" / run

    def tensors(self, run: str) -> dict[str, torch.Tensor]:
        """What a run left: the server's checkpoint, and the model that every site deployed."""
        files = {"server": self.run_folder("server", run) / "checkpoint.safetensors"}
        files |= {site: self.run_folder(site, run) / "vault" / "deployed.safetensors" for site in self.system.sites}
        return tensors_in(files)

    def in_process(self, study: Study) -> dict[str, torch.Tensor]:
        """The same study without FLARE."""
        number = self._names.setdefault("in process", 0)
        self._names["in process"] = number + 1
        folder = self.folder / "in-process" / str(number)
        simulate(self.cohort, study, folder)
        files = {"server": folder / "server" / "checkpoint.safetensors"}
        files |= {site: folder / "sites" / site / "vault" / "deployed.safetensors" for site in self.cohort.sites}
        return tensors_in(files)


@contextmanager
def hospitals_in(
    folder: Path, *, sites: Sequence[str] = SITES, secure_aggregation: bool = False, record: Path | None = None
) -> Iterator[Hospitals]:
    """Make hospitals, start FLARE around them, and stop everything at the end.

    Args:
        folder: for all of it.
        sites: the hospitals' names.
        secure_aggregation: whether their kits demand it of every job.
        record: where processes leave what the recorder sees; they run without it if not given.
    """
    data, pack = folder / "hospitals", folder / "pack"
    write_pack(pack, len(sites))
    for site in sites:
        (data / site).mkdir(parents=True)
        os.link(pack / f"{site}.npz", data / site / f"{site}.npz")
    cohort = load(pack, size=SIZE, batch_size=BATCH)
    kits = {
        site: SiteKit(data_root=data / site, minimum_cell=1, secure_aggregation=secure_aggregation) for site in sites
    }
    system = LocalSystem.make(folder / "system", kits)
    with recorded_in(record):
        system.start()
    try:
        system.wait_until_ready(120)
        yield Hospitals(folder, system, data, pack, cohort)
    finally:
        system.stop()


def write_pack(folder: Path, sites: int) -> None:
    """Draw hospitals and keep their images as a pack: reading DICOM would cost every process of a site seconds.

    It is the import of the libraries that takes them; a job is mostly the start and the end of its processes.
    """
    with TemporaryDirectory() as drawn:
        write_hospitals(Path(drawn) / "films", sites=sites, patients=24, seed=5)
        cohort = load(Path(drawn) / "films", size=SIZE, batch_size=BATCH)
    folder.mkdir(parents=True)
    for name, site in cohort.sites.items():
        splits = (site.train, site.val, site.test)
        pixels = torch.cat([pixels_of(split.images[:]) for split in splits])
        np.savez(
            folder / f"{name}.npz",
            x=(255 * pixels[:, 0]).round().byte().numpy(),
            y=torch.cat([split.labels for split in splits]).numpy(),
            split=np.repeat(np.arange(len(splits)), [len(split) for split in splits]),
            ids=np.array([each for split in splits for each in split.ids]),
            classes=np.array(cohort.classes),
        )


@contextmanager
def recorded_in(folder: Path | None) -> Iterator[None]:
    """Whatever is started meanwhile, and whatever that starts, has the recorder in it."""
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setenv("PYTHONPATH", str(RECORDER), prepend=os.pathsep)
            patch.setenv("CROSSWARD_RECORDER", str(folder))
        yield


def small_study(
    method: str | Method, cohort: Cohort, *, rounds: int = 3, steps: int = 6, quorum: int | None = None
) -> Study:
    """A study that takes seconds; more steps make rounds long enough to do something in them."""
    return Study(
        method=create(method) if isinstance(method, str) else method,
        task=Task(classes=cohort.classes, channels=1, size=SIZE, rounds=rounds, width=WIDTH),
        training=Training(batch_size=BATCH, steps=steps),
        plugs=Plugs(),
        quorum=quorum,
    )


def watched(
    console: Console, job: Path, actions: Mapping[Moment, Action], *, resume: bool = True
) -> tuple[Outcome, list[Event]]:
    """Submit a job and follow it; each action is done once, when its moment comes."""
    events: list[Event] = []
    waiting = dict(actions)
    job_id = console.submit(job)

    def listen(event: Event) -> None:
        events.append(event)
        action = waiting.pop((event.kind, event.round_number), None)
        if action is not None:
            action(job_id)

    outcome = follow(console, job_id, listen=listen, job=job, pace=PACE, resume=resume)
    assert not waiting, f"these moments never came: {list(waiting)}"
    return outcome, events


def tensors_in(files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    return {
        f"{owner}/{name}": tensor for owner, file in files.items() for name, tensor in read_tensors(file)[0].items()
    }


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any value, relative to the largest value of its tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[name].double() - other[name].double()).abs().max() / max(1e-30, float(one[name].abs().max())))
        for name in one
        if one[name].numel()
    )
