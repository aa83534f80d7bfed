"""What a federation can hand to a hospital that never trained: the best round's shared model, and what was run.

The server writes it when a run has completed. Personal tensors are in it as their mean over the sites, or as
they were at the start where the server may not read the mean; and of the tensors beside the model only those that a
newcomer needs (FedCode's class prototypes).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from crossward.federation.contract import State, Tensors
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.storage import read_tensors, write_tensors
from crossward.site.study import Study

HANDOVER = "handover.safetensors"
_FORMAT = "crossward.handover/1"
_PLACES = (HANDOVER, f"server/{HANDOVER}", f"**/workspace/*/{HANDOVER}")
"""In the folder of a run in one process, and in that of a job's download."""


@dataclass(frozen=True)
class Handover:
    """A trained federation as a newcomer sees it.

    Attributes:
        study: what was run.
        round_number: whose model it is.
        tensors: the shared model, and what else a newcomer needs.
    """

    study: Study
    round_number: int
    tensors: Tensors


def write_handover(path: Path, study: Study, state: State) -> None:
    """Write what a newcomer needs."""
    options = json.dumps(study.options(), allow_nan=False)
    metadata = {"format": _FORMAT, "study": options, "round": str(state.round_number)}
    model = study.model()
    needed = {*names_in(layout_of(model), *(scope for scope in Scope if scope.leaves)), *study.method.welcomes(model)}
    write_tensors(path, {name: tensor for name, tensor in state.common().items() if name in needed}, metadata)


def read_handover(path: Path) -> Handover:
    """Read it from the file, or from the folder of a finished run.

    Raises:
        BadInput: there is none, or it is of another kind.
    """
    if path.is_dir():
        found = [place for pattern in _PLACES for place in sorted(path.glob(pattern))]
        path = found[0] if found else path / HANDOVER
    if not path.is_file():
        raise BadInput(
            f"{path} is not there; give the folder of a finished run (crossward simulate, ./poc/run), "
            f"or the {HANDOVER} of a job's download"
        )
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != _FORMAT:
        raise BadInput(f"{path} is not what a federation hands over; give a {HANDOVER}")
    return Handover(Study.from_options(json.loads(metadata["study"])), int(metadata["round"]), tensors)
