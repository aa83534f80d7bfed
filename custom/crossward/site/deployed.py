"""The models that sites deployed, read from their vaults: for whoever may look into every site's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crossward.federation.storage import read_tensors
from crossward.imaging.data import Split
from crossward.methods.base import Method, Model, Prediction
from crossward.site.devices import Device
from crossward.site.study import Study
from crossward.site.trainer import predict


@dataclass(frozen=True)
class Deployed:
    """One site's deployed model, ready to answer."""

    site: str
    model: Model
    method: Method
    device: Device

    def answer(self, split: Split) -> Prediction:
        """What this site's model says about images, in order."""
        return predict(self.model, self.method, split, device=self.device)

    def accuracy(self, split: Split) -> float | None:
        """The share of images that it answers correctly; None without images."""
        if not len(split):
            return None
        return float((self.answer(split).probabilities.argmax(1) == split.labels).double().mean())


def deployed_models(study: Study, folders: Mapping[str, Path]) -> dict[str, Deployed]:
    """Read what every site deployed.

    Args:
        study: what was run.
        folders: of the run at every site, each with its vault; a site that deployed nothing is left out.
    """
    found = {}
    for site, folder in folders.items():
        path = folder / "vault" / "deployed.safetensors"
        if path.exists():
            model = study.model()
            model.load_state_dict(read_tensors(path)[0])
            found[site] = Deployed(site, model, study.method, Device.best().take(model))
    return found
