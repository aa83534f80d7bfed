"""A model for a hospital that did not train: what is shared, fitted to its unlabelled images."""

from __future__ import annotations

from crossward.federation.contract import Tensors
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.seeds import derive
from crossward.imaging.data import Split
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
