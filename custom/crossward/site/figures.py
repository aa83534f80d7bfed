"""The figures of a round that a run writes down, in process and on FLARE alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossward.evaluate.transfer import measured
from crossward.federation.contract import CORRECT, LOSS, SEEN, VALIDATION_COUNT, Payload, Report, Vector
from crossward.imaging.data import Cohort


def figures_of(report: Report, *, seconds: float) -> dict[str, Any]:
    """What a site's report says about its training; the validation comes when the round's model is back."""
    seen = float(report.tally[SEEN].item())
    return {
        "status": "reported",
        # Under differential privacy nothing of this is counted.
        "loss": float(report.tally[LOSS].item()) / seen if seen else None,
        "train_accuracy": float(report.tally[CORRECT].item()) / seen if seen else None,
        "val_accuracy": None,
        "val_accuracy_as_received": None,
        "seconds": seconds,
        "bytes_up": nbytes(report),
    }


def nbytes(message: Payload | Report) -> int:
    """The size of the tensors in a message."""
    tensors = message.tensors if isinstance(message, Payload) else message.update
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def share(tally: Mapping[str, Vector], key: str) -> float | None:
    """The part of a site's validation images that a count is of; None where it has none."""
    count = float(tally[VALIDATION_COUNT].item())
    return float(tally[key].item()) / count if count else None


def facts_of(cohort: Cohort) -> dict[str, Any]:
    """What a result says about the images."""
    return {
        "path": cohort.source,
        "kind": cohort.kind,
        "classes": list(cohort.classes),
        "phantom": cohort.phantom,
        "size": cohort.size,
    }


def cross_site_of(cohort: Cohort, names: Sequence[str], accuracy: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """What a result says about every site's model (row) on every site's test images (column)."""
    return measured(names, accuracy, [cohort.sites[name].scanner for name in names])
