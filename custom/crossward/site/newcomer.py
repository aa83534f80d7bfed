"""A model for a hospital that did not train: what is shared, fitted to its unlabelled images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossward.evaluate.metrics import wilson_interval
from crossward.federation.contract import Tensors
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.seeds import derive
from crossward.imaging.data import Split
from crossward.imaging.held_out import NO_CLASS, NamedScans
from crossward.imaging.splits import TEST, TRAIN, split_patients
from crossward.site.deployed import Deployed
from crossward.site.devices import Device
from crossward.site.study import Study
from crossward.site.trainer import refreshed


def newcomer(study: Study, shared: Tensors, images: Split, *, site: str) -> Deployed:
    """Make the model that a new hospital can use before it has labels.

    Parts that never leave a site are left out where the method can do without them (RFedDis's local head, F2DC's
    modules); normalisation that stays local is taken from the common start. Statistics come from the hospital's images.

    Args:
        study: what was run.
        shared: the federation's model, such as a payload of the server, or what a partner deployed: anything beside
            the study's shared tensors is not used.
        images: of the new hospital; their labels are not looked at.
        site: the new hospital's name.

    Raises:
        BadInput: a shared tensor is missing or of another shape, or the method shares no model at all.
    """
    model = study.model()
    layout = layout_of(model)
    names = names_in(layout, *(scope for scope in Scope if scope.leaves))
    if not names:
        raise BadInput(f"{study.method.name} shares no model, so there is none for {site}; choose a federated method")
    for name in names:
        if name not in shared or tuple(shared[name].shape) != layout[name].shape:
            raise BadInput(
                f"the model for {site} lacks '{name}', or has it in another shape; give the study's own model"
            )
    model.load_state_dict({**model.state_dict(), **{name: shared[name] for name in names}})
    model.forget_local()
    device = Device.best().take(model)
    fitted = refreshed(model, images, device=device, seed=derive(study.training.seed, site, "refresh"))
    return Deployed(site, fitted, study.method, device)


def try_newcomer(
    study: Study, models: Mapping[str, Deployed], held_out: Mapping[str, NamedScans]
) -> dict[str, Any] | None:
    """Treat a held-out set of a scanner that no site has as a hospital that joins without labels.

    Half of the scans, without their labels, fit the newcomer's statistics; it is tested on the other half, beside the
    models that the sites deployed.

    Returns:
        For ``result["newcomer"]``; None where no set has classes for labels, or too few scans, or the method shares no
        model.
    """
    known = {what: scans for what, scans in held_out.items() if bool((scans.split.labels != NO_CLASS).all())}
    if not known or not models or not names_in(layout_of(study.model()), Scope.SHARED):
        return None
    what, scans = next(iter(known.items()))
    fitting, test = halves(scans.split, seed=study.training.seed)
    # A single image has no statistics: the newcomer would answer with those of a partner.
    if len(fitting) < 2 or not len(test):
        return None
    shared = next(iter(models.values())).model.state_dict()
    new = newcomer(study, shared, fitting, site=what)
    right = int((new.answer(test).probabilities.argmax(1) == test.labels).sum())
    return {
        "set": what,
        "n_fitting": len(fitting),
        "n_test": len(test),
        "accuracy": right / len(test),
        "accuracy_interval": wilson_interval(right, len(test)),
        "partners": {site: model.accuracy(test) for site, model in models.items()},
    }


def halves(split: Split, *, seed: int) -> tuple[Split, Split]:
    """Half of the patients of every class, and the other half: no patient is in both."""
    parts = split_patients(split.patients, split.labels.tolist(), seed=seed, fractions=(0.5, 0.0, 0.5))
    return split.rows(parts == TRAIN), split.rows(parts == TEST)
