"""Differential privacy of a whole site: one update a round, clipped as a whole, with noise on every value.

Whoever sees all that leaves can hardly tell what data the site had at all. That takes noise of the size of the update
on each of its values: it suits small payloads, such as heads and statistics, and drowns a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, Payload, Tensors, Vector
from crossward.imaging.data import SiteData, Split
from crossward.imaging.loading import batches
from crossward.methods.base import Batch, Context, Method, Model
from crossward.privacy.dp.accounting import Part, Spending, calibrate
from crossward.privacy.dp.clipping_common import NotFinite
from crossward.privacy.dp.lines import Shared
from crossward.privacy.dp.noise import FARTHEST
from crossward.privacy.dp.settings import Privacy
from crossward.site.protection import Protection
from crossward.site.trainer import EVALUATION_BATCH, Training, train_round

UPDATE = "update"
"""What is paid for in every round, by its name in the ledger."""

_ROUNDED = 1.001
"""The clip, and what rounding in single precision may add to it."""


def noise_of(privacy: Privacy, *, rounds: int) -> float:
    """Noise of one update, as a multiple of the clip: the planned rounds together stay within epsilon."""
    return privacy.noise or calibrate(epsilon=privacy.epsilon or math.nan, delta=privacy.delta, rate=1.0, steps=rounds)


def reach_of(privacy: Privacy, *, rounds: int, shared: Shared | None) -> float | None:
    """How far a value of an update can be from 0, where sites share the noise; None where they do not.

    It is the clip and the farthest noise that there is, so that nothing is ever cut off. It follows from the study
    alone: limits made of the updates themselves, or counts of what they cut off, would be releases of what has a share
    of the noise only.
    """
    if shared is None:
        return None
    return privacy.clip * (_ROUNDED + FARTHEST * noise_of(privacy, rounds=rounds) / math.sqrt(shared.honest))


class UpdateProtection(Protection):
    """The unit is the site: it trains as always, and the result is clipped and noised once, before the outbox."""

    units = 1

    def __init__(self, data: SiteData, privacy: Privacy, training: Training, **options: Any) -> None:
        super().__init__(data, privacy, training, **options)
        self.noise = noise_of(privacy, rounds=self._rounds)
        self.reach = reach_of(privacy, rounds=self._rounds, shared=self._shared)

    def planned(self) -> dict[str, Spending]:
        return {UPDATE: Spending(self.noise, 1.0, self._rounds)}

    def train(self, model: Model, method: Method, context: Context) -> dict[str, Vector]:
        self._reserve(context.round_number, {UPDATE: Spending(self.noise, 1.0, 1)})
        train_round(model, method, self._data.train, context, training=self._training, device=self._device)
        # Every site counts the same, and nothing is counted: a number of images would be a part of what is hidden.
        return {SAMPLES: np.ones(1), **{key: np.zeros(1) for key in (LOSS, SEEN, CORRECT)}}

    def extras(self, model: Model, method: Method, context: Context) -> Tensors:
        model.eval()
        split, device = self._data.train, self._device
        loaded = batches(split, batch_size=EVALUATION_BATCH, seed=None, drop_last=False)
        with torch.inference_mode(), device.autocast():
            found = method.describe(
                model, (Batch(device.images(images), labels.to(device.kind)) for images, labels in loaded), context
            )
        return {name: tensor.float().cpu().clone() for name, tensor in found.items()}

    def released(
        self, update: Mapping[str, Tensor], payload: Payload, *, personal: Collection[str]
    ) -> dict[str, Tensor]:
        """Clip the update's joint norm and add noise to all of it; personal tensors as what changed in them.

        With noise that the sites share, one site's own is less than it takes: only a sum may be seen, which has that
        of all the honest ones that are left in the smallest.
        """
        moved = {name: value - payload.tensors[name] if name in personal else value for name, value in update.items()}
        norm = math.hypot(*(float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in moved.values()))
        if not math.isfinite(norm):
            raise NotFinite(
                f"{self._data.name}: the update has values that are not finite numbers; nothing was released. "
                "Lower the learning rate, or repair the site's images"
            )
        scale = min(1.0, self._privacy.clip / norm) if norm else 1.0
        clipped = {name: value * scale for name, value in moved.items()}
        parts = self._shared.honest if self._shared else 1
        self._source.add_to(list(clipped.values()), scale=self.noise * self._privacy.clip / math.sqrt(parts))
        return {name: value + payload.tensors[name] if name in personal else value for name, value in clipped.items()}

    def units_in(self, split: Split) -> int:
        """None: how many images a site has is a part of what is hidden."""
        del split
        return 0

    def counted(self, part: Part, split: Split, right: Tensor, round_number: int) -> tuple[float, float]:
        """Nothing: of one site's images no count can be told."""
        del part, split, right, round_number
        return 0.0, 0.0
