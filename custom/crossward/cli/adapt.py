"""``crossward adapt``: a trained federation's model for a hospital that did not train, fitted without labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from crossward.cli.progress import counting
from crossward.cli.study_options import check_folder
from crossward.evaluate.facts import finite
from crossward.evaluate.metrics import wilson_interval
from crossward.evaluate.table import percent
from crossward.federation.storage import write_json
from crossward.imaging.data import Split
from crossward.imaging.folder import LABELS
from crossward.imaging.held_out import load_held_out_set
from crossward.imaging.unlabelled import load_unlabelled
from crossward.site.adapt import EPOCHS, LEARNING_RATE, Adapted, write_adapted
from crossward.site.adapt import adapt as adapt_to
from crossward.site.handover import Handover, read_handover
from crossward.site.newcomer import halves


@dataclass(frozen=True)
class Images:
    """What the hospital has: images to fit to, and labelled ones to see what that was worth, where there are any."""

    fitting: Split
    test: Split | None
    scanner: str
    rejected: dict[str, int]


def adapt(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run, or the handover.safetensors of a job.")],
    data: Annotated[Path, typer.Option(help="Folder of the hospital's DICOM files; no labels needed.")],
    out: Annotated[Path, typer.Option(help="Folder for adapted.safetensors and adaptation.json.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = EPOCHS,
    lr: Annotated[float, typer.Option(help="Learning rate (Adam).")] = LEARNING_RATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print adaptation.json; everything else to stderr.")] = False,
) -> None:
    """Fit a trained federation's model to a hospital that has no labels, and say what changed.

    FDSE trains its skew erasers on the consistency of their statistics, and nothing else; the other methods do without
    what never left a site, and take the hospital's own statistics. Where the folder has a labels.csv, half of the
    patients fit the model, without their labels, and the other half shows how many answers are right before and after.

    Example: crossward adapt runs/fdse --data phantoms/held-out/unseen-scanner --out runs/adapted
    """
    check_folder(out)
    console = Console(stderr=as_json)
    handover = read_handover(model)
    with counting(Console(stderr=True)) as progress:
        images = _images(data, handover, progress)
    console.print(_opening(handover, images, data), soft_wrap=True, highlight=False, markup=False)

    def listen(epoch: int, loss: float) -> None:
        console.print(f"epoch {epoch:3d}/{epochs}  label-free loss {loss:.3g}", highlight=False)

    adapted = adapt_to(
        handover.study,
        handover.tensors,
        images.fitting,
        site=data.absolute().name,
        epochs=epochs,
        learning_rate=lr,
        listen=listen,
    )
    facts = finite(_facts(handover, images, adapted, data))
    write_adapted(out / "adapted.safetensors", handover, adapted)
    write_json(out / "adaptation.json", facts)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    _show(console, facts)
    console.print(f"Model: {out / 'adapted.safetensors'}\nFigures: {out / 'adaptation.json'}", soft_wrap=True)


def _images(data: Path, handover: Handover, progress: Any) -> Images:
    task, seed = handover.study.task, handover.study.training.seed
    if (data / LABELS).is_file():
        scans = load_held_out_set(
            data, classes=task.classes, size=task.size, channels=task.channels, seed=seed, progress=progress
        )
        fitting, test = halves(scans.split, seed=seed)
        return Images(fitting, test, "", {})
    found = load_unlabelled(data, size=task.size, channels=task.channels, progress=progress)
    return Images(found.split, None, found.scanner, dict(found.rejected))


def _opening(handover: Handover, images: Images, data: Path) -> str:
    lines = [
        f"{handover.study.method.title} ({handover.study.method.name}), round {handover.round_number}; "
        f"{len(images.fitting)} images of {data.name}{f' ({images.scanner})' if images.scanner else ''} to fit it to"
        + (f", {len(images.test)} labelled ones of other patients to try it on" if images.test else "")
    ]
    lines += [f"left out: {count} file(s): {reason}" for reason, count in images.rejected.items()]
    return "\n".join(lines)


def _facts(handover: Handover, images: Images, adapted: Adapted, data: Path) -> dict[str, Any]:
    shown, classes = images.test or images.fitting, handover.study.task.classes
    answers = {name: stage.answer(shown) for name, stage in adapted.stages.items()}
    first = next(iter(answers.values())).probabilities.argmax(1)
    stages = {}
    for name, answer in answers.items():
        chosen = answer.probabilities.argmax(1)
        right = int((chosen == images.test.labels).sum()) if images.test else None
        stages[name] = {
            "accuracy": None if right is None else right / len(shown),
            "accuracy_interval": None if right is None else wilson_interval(right, len(shown)),
            "uncertainty": float(answer.uncertainty.mean()),
            "changed": float((chosen != first).double().mean()),
            "answers": dict(zip(classes, chosen.bincount(minlength=len(classes)).tolist(), strict=True)),
        }
    return {
        "method": handover.study.method.name,
        "round": handover.round_number,
        "data": data.name,
        "n_fitting": len(images.fitting),
        "n_test": len(images.test) if images.test else 0,
        "rejected": images.rejected,
        "losses": adapted.losses,
        "distance": adapted.distance,
        "stages": stages,
        "deployed": next(reversed(adapted.stages)),
    }


def _show(console: Console, facts: dict[str, Any]) -> None:
    labelled = facts["n_test"] > 0
    table = Table(title="before and after", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("model")
    for heading in (*(["right %"] if labelled else []), "mean uncertainty", "answers changed %"):
        table.add_column(heading, justify="right")
    for name, stage in facts["stages"].items():
        right = [percent(stage["accuracy"], stage["accuracy_interval"])] if labelled else []
        table.add_row(name, *right, f"{stage['uncertainty']:.3f}", f"{100 * stage['changed']:.1f}")
    console.print(table)
    if facts["distance"]:
        before, after = facts["distance"]
        console.print(
            f"Distance of its statistics from the federation's: {before:.3g} before, {after:.3g} after", highlight=False
        )
    else:
        console.print(f"{facts['method']} has no part to fit without labels beyond its statistics.", highlight=False)
    console.print(f"Deployed: {facts['deployed']}.", highlight=False)
