"""Made-up hospitals, small enough to train in milliseconds; also for the processes that tests start and kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossward.federation.coordinator import Coordinator
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Cohort, SiteData, Split
from crossward.methods.base import Method, Task
from crossward.methods.registry import create
from crossward.site.devices import Device
from crossward.site.inprocess import Event, simulate
from crossward.site.outbox import Outbox
from crossward.site.participant import Participant, Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training
from crossward.site.vault import Vault

SITES = ("alder", "birch", "cedar")
CLASSES = ("clear", "nodule", "mass")
SIZE = 8
BATCH = 8
TRAINED_ON = 20
ROUNDS = 4
NARROW = 0.0625
# As wide as what is trained in earnest, so that the memory layout is the one used there.
WIDE = 0.25
CPU = Device(torch.device("cpu"), None)


def made_up_split(
    count: int, *, seed: int, classes: int = len(CLASSES), gain: float = 1.0, shift: float = 0.0
) -> Split:
    """Noise with one bright quadrant, which is the class; ``gain`` and ``shift`` are the site's scanner."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    half = SIZE // 2
    for row, label in enumerate(labels.tolist()):
        down, right = divmod(label, 2)
        images[row, :, down * half : (down + 1) * half, right * half : (right + 1) * half] += 0.9
    names = tuple(f"{seed}-{row}" for row in range(count))
    return Split(gain * images + shift, labels, names, names)


def made_up_site(name: str, *, train: int = TRAINED_ON, val: int = 9, test: int = 9, number: int = 0) -> SiteData:
    gain, shift = 1.0 + 0.8 * number, 0.7 * number
    parts = (
        made_up_split(count, seed=100 * number + part, gain=gain, shift=shift)
        for part, count in enumerate((train, val, test))
    )
    return SiteData(name, CLASSES, *parts, scanner=f"scanner {number}")


def made_up_cohort(names: Iterable[str] = SITES, **counts: int) -> Cohort:
    """The sites in the order given; a site's images depend on its name alone."""
    sites = {name: made_up_site(name, number=SITES.index(name), **counts) for name in names}
    return cohort_of(sites)


def cohort_of(sites: dict[str, SiteData]) -> Cohort:
    return Cohort(sites, CLASSES, "pack", 1, SIZE, True, "made up", ())


def made_up_task(**changes: Any) -> Task:
    return replace(Task(classes=CLASSES, channels=1, size=SIZE, rounds=ROUNDS, width=NARROW), **changes)


def made_up_training(**changes: Any) -> Training:
    return replace(Training(epochs=1, batch_size=BATCH, learning_rate=0.05), **changes)


def made_up_study(
    method: str | Method = "fedavg",
    *,
    rounds: int = ROUNDS,
    participation: float = 1.0,
    quorum: int | None = None,
    **training: Any,
) -> Study:
    return Study(
        method=create(method) if isinstance(method, str) else method,
        task=made_up_task(rounds=rounds),
        training=made_up_training(**training),
        plugs=Plugs(),
        participation=participation,
        quorum=quorum,
    )


def made_up_participant(
    folder: Path, method: str | Method = "fedavg", *, data: SiteData | None = None, **training: Any
) -> Participant:
    return Participant(
        data or made_up_site("alder"),
        create(method) if isinstance(method, str) else method,
        made_up_task(),
        training=made_up_training(**training),
        folder=folder,
        device=CPU,
        plugs=Plugs(),
    )


def without_seconds(value: Any) -> Any:
    """A result without its clock times, all else kept."""
    if isinstance(value, dict):
        return {key: without_seconds(part) for key, part in value.items() if key != "seconds"}
    if isinstance(value, list):
        return [without_seconds(part) for part in value]
    return value


def tensors_on_disk(folder: Path) -> dict[str, torch.Tensor]:
    """What a run leaves behind: the server's checkpoint and the model that every site deployed."""
    files = {"server": folder / "server" / "checkpoint.safetensors"}
    files |= {path.name: path / "vault" / "deployed.safetensors" for path in sorted((folder / "sites").iterdir())}
    return {
        f"{owner}/{name}": tensor for owner, file in files.items() for name, tensor in read_tensors(file)[0].items()
    }


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(point: str, method: str, folder: Path) -> None:
    """Run a study in this process and kill it at a named point of round 2 or later."""
    death: Callable[[Event], None] = lambda event: None  # noqa: E731
    match point:
        case "training":
            steps = len(SITES) * (TRAINED_ON // BATCH) + TRAINED_ON // BATCH + 1
            _kill_in_call(torch.optim.SGD, "step", number=steps + 1, before=True)
        case "vaulted":
            _kill_in_call(Vault, "keep_local", number=len(SITES) + 2)
        case "outbox":
            _kill_in_call(Outbox, "put", number=len(SITES) + 2)
        case "first round":
            death = _kill_at("trained", round_number=1, site="birch")
        case "accepted":
            death = _kill_at("trained", round_number=2, site="alder")
        case "checkpointed":
            _kill_in_call(Coordinator, "close_round", number=2)
        case "assessing":
            _kill_in_call(Participant, "receive", number=len(SITES) + 1)
        case "writing":
            _kill_in_fsync("checkpoint.safetensors", number=3)
        case "deploying":
            _kill_in_call(Vault, "promote", number=2)
        case _:
            raise ValueError(point)
    simulate(made_up_cohort(), made_up_study(method), folder, jobs=1, listen=death)


def run_children_until_killed(runs: Iterable[tuple[str, str, Path]]) -> None:
    """Run (point, method, folder) each in a process of its own; forked, so that PyTorch is imported once."""
    import torch._dynamo  # every optimiser imports it, slowly

    for point, method, folder in runs:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            run_until_killed(point, method, folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"{method} was not killed at '{point}': status {status}")


def _kill_at(kind: str, *, round_number: int, site: str) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if (event.kind, event.round_number, event.site) == (kind, round_number, site):
            die()

    return listen


def _kill_in_call(owner: type, name: str, *, number: int, before: bool = False) -> None:
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == number:
            die()
        result = original(*args, **options)
        if calls == number:
            die()
        return result

    setattr(owner, name, counted)


def _kill_in_fsync(name: str, *, number: int) -> None:
    """Die when all bytes of a file are written but it has not been given its name yet."""
    original, calls = os.fsync, 0

    def counted(descriptor: int) -> None:
        nonlocal calls
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls += 1
            if calls == number:
                die()
        original(descriptor)

    os.fsync = counted
