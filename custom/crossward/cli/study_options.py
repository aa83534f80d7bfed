"""What the commands that describe a study have in common: their options, and how these are read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from crossward.federation.errors import BadInput
from crossward.methods.base import BLOCKS, HEADS, Net, Task
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.ring import Bits
from crossward.privacy.secagg.settings import Settings
from crossward.site.study import Study

Rounds = Annotated[int, typer.Option(min=1, help="Rounds to run.")]
MethodOptions = Annotated[list[str] | None, typer.Option("--option", "-o", help="Option of the method, as mu=0.1.")]
Block = Annotated[str | None, typer.Option(help="Feature block; the method's own if not given.")]
HeadName = Annotated[str | None, typer.Option("--head", help="Head; the method's own if not given.")]
Epochs = Annotated[int, typer.Option(help="Local epochs a round.")]
Steps = Annotated[int, typer.Option(help="Local steps a round instead of epochs; 0: use epochs.")]
BatchSize = Annotated[int, typer.Option(help="Images a step.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate of the first round.")]
Schedule = Annotated[str, typer.Option(help="Learning rate over rounds: cosine or constant.")]
Clip = Annotated[float, typer.Option(help="Largest gradient norm; 0: the method's own, for most none.")]
Augment = Annotated[str, typer.Option(help="Random changes to training images: none, shift or shift-flip.")]
Seed = Annotated[int, typer.Option(help="Decides splits, start and order; the same seed, the same model.")]
Size = Annotated[int, typer.Option(help="Side of the images in pixels.")]
NetName = Annotated[str, typer.Option("--net", help="resnet, or alexnet (images of 63 px or more).")]
Depth = Annotated[int, typer.Option(help="ResNet-10 or ResNet-18.")]
Width = Annotated[float, typer.Option(help="Width of the net; 1 is 64-128-256-512.")]
NormName = Annotated[str, typer.Option("--norm", help="batch or group.")]
Secagg = Annotated[
    bool, typer.Option("--secagg/--no-secagg", help="Secure aggregation: the server sees sums over sites only.")
]
MinSum = Annotated[int, typer.Option("--min-sum", help="Fewest sites in a sum, under secure aggregation.")]
RingBits = Annotated[int, typer.Option(help="Bits a number takes under secure aggregation: 32, 24 or 16.")]
DpEpsilon = Annotated[
    float | None, typer.Option("--dp", help="Differential privacy: epsilon of the whole run at every site.")
]
DpEpsilonOfARun = Annotated[
    float | None,
    typer.Option(
        "--dp",
        help="Differential privacy: epsilon of this run at every site; other runs on the same images are not counted.",
    ),
]
DpNoise = Annotated[
    float | None, typer.Option("--dp-noise", help="Differential privacy: noise multiplier of a step, instead of --dp.")
]
DpClip = Annotated[float, typer.Option(help="Largest norm of what one patient adds to a step.")]
DpDelta = Annotated[float, typer.Option(help="The chance that epsilon does not cover.")]
DpUnit = Annotated[str, typer.Option(help="Whose presence is hidden: patient, image, or site.")]
DpDistributed = Annotated[
    bool, typer.Option("--dp-distributed", help="With --dp-unit site and --secagg: sites share the noise of a sum.")
]
Outlier = Annotated[
    float, typer.Option(help="Reject a round this many times as long as earlier ones of its sites; 0: none.")
]
Participation = Annotated[float, typer.Option(help="Part of the sites invited to a round.")]


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read method options given as name=value."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise BadInput(f"'{pair}' is not an option; write it as name=value, such as mu=0.1")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def parse_names(text: str | None) -> list[str] | None:
    """Read a list with commas."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def check_choices(
    *,
    block: str | None = None,
    head: str | None = None,
    net: str = Task.net,
    depth: int = Task.depth,
    norm: str = Task.norm,
    width: float = Task.width,
) -> None:
    """Refuse a net that does not exist, before any image is read."""
    for name, value, known in (
        ("block", block, [None, *BLOCKS]),
        ("head", head, [None, *HEADS]),
        ("net", net, get_args(Net)),
        ("depth", depth, [10, 18]),
        ("norm", norm, ["batch", "group"]),
    ):
        if value not in known:
            raise BadInput(f"--{name} {value} is not there; there is: {', '.join(str(each) for each in known if each)}")
    if not 0 < width <= 4:
        raise BadInput(f"--width {width} is not above 0 and at most 4")


def masked(study: Study, *, min_sum: int = Settings.min_sites, ring_bits: int = Settings.bits) -> Study:
    """A study under secure aggregation, with the options that its method then demands."""
    if ring_bits not in get_args(Bits):
        raise BadInput(f"--ring-bits {ring_bits} is not there; there is: 32, 24, 16")
    if min_sum < 2:
        raise BadInput(f"--min-sum {min_sum} is not at least 2: a sum over one site is that site's part")
    bits: Any = ring_bits
    return study.masked(Settings(bits=bits, min_sites=min_sum, allow_pair=min_sum == 2))


def private(
    study: Study,
    *,
    epsilon: float | None,
    noise: float | None,
    clip: float,
    delta: float,
    unit: str,
    distributed: bool,
) -> Study:
    """A study under differential privacy where it is asked for, with what its method then demands."""
    if epsilon is None and noise is None:
        return study
    kind: Any = unit
    return study.private(
        Privacy(epsilon=epsilon, noise=noise, clip=clip, delta=delta, unit=kind, distributed=distributed)
    )


def check_folder(out: Path) -> None:
    """Refuse an output folder that cannot be written, before any image is read."""
    nearest = out
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BadInput(f"cannot write to {out}; choose another --out")
