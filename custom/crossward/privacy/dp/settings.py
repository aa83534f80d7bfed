"""What a study asks for: how much a patient may show, and how the noise for it is spread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from crossward.federation.errors import BadInput

Unit = Literal["patient", "image", "site"]
UNITS: tuple[str, ...] = get_args(Unit)
"""Whose presence is hidden. None of them stands for another: where a site's update is clipped as a whole, one patient
more can turn it round, which moves it by twice the clip; and with one image of a patient less, another one is taken."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy of a study, the same for every site; each works out its noise from its number of patients.

    Two data sets that differ by one unit give any result with probabilities that differ by a factor of at most
    exp(epsilon), but for a chance of delta.

    Attributes:
        epsilon: of the whole run, at every site; the noise is worked out from it. None where ``noise`` is given.
        noise: standard deviation of a step's noise, as a multiple of ``clip``. None where ``epsilon`` is given.
        delta: the chance that is not covered by epsilon.
        clip: largest norm of what one unit adds to a step: of all trainable tensors together, local ones too.
        unit: whose presence is hidden: a patient with all images, one image, or all that a site has.
        releases: part of epsilon for what a method reports beside the model, such as class prototypes.
        distributed: with the site as unit and under secure aggregation, every site adds only its share of the noise.
            Epsilon then holds against the server with as many colluding sites as the settings of secure aggregation
            reckon with; it is better against the server alone.
    """

    epsilon: float | None = None
    noise: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    unit: Unit = "patient"
    releases: float = 0.25
    distributed: bool = False

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise is None):
            raise BadInput("differential privacy takes either an epsilon or a noise multiplier, and not both")
        for name in ("epsilon", "noise", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadInput(f"differential privacy: {name} is {value}, and must be a finite number above 0")
        if not 0 < self.delta < 0.1:
            raise BadInput(f"differential privacy: delta is {self.delta}, and must be above 0 and below 0.1")
        if not 0 < self.releases < 1:
            raise BadInput(f"differential privacy: releases is {self.releases}, and must be between 0 and 1")
        if self.unit not in UNITS:
            raise BadInput(f"differential privacy: the unit is '{self.unit}', and must be patient, image or site")
        if self.distributed and self.unit != "site":
            raise BadInput("differential privacy: noise is shared where the site is the unit; use --dp-unit site")
