"""Label recovery: which classes an update was made from (Zhao, Mopuri and Bilen 2020, iDLG).

For cross-entropy, the gradient of the last layer's bias is the predicted probabilities less the labels: it is below 0
for the class of the image, and for no other. Its weights show the same where features are positive, as they are behind
a ReLU or a sigmoid.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from crossward.federation.errors import BadInput


def label_of(rows: Tensor) -> int:
    """The class of the one image behind a gradient of the last layer.

    Args:
        rows: of the bias [K], or of the weights [K,d] behind positive features.
    """
    _check(rows)
    return int(rows.flatten(1).sum(dim=1).argmin() if rows.ndim > 1 else rows.argmin())


def labels_of(bias: Tensor, predicted: Tensor, images: int) -> Counter[int]:
    """The classes of a batch, with how often each is there, from the mean gradient of the last layer's bias.

    Args:
        bias: [K], mean over the batch.
        predicted: [K], probabilities that the model gives on average; the attacker has the model, and takes them from
            images of its own.
        images: in the batch.
    """
    _check(bias)
    if bias.shape != predicted.shape or images < 1:
        raise BadInput(
            "the labels of a batch follow from a bias and as many probabilities, and it has an image or more"
        )
    shares = (predicted - bias).double() * images
    found = Counter({label: max(0, int(share)) for label, share in enumerate(shares.tolist())})
    # What rounding down leaves over goes to the classes with the largest rest.
    for label in (shares - shares.floor()).argsort(descending=True).tolist():
        if found.total() < images:
            found[label] += 1
    return found


def agreement(found: Counter[int], truth: Counter[int]) -> float:
    """The share of labels that were recovered, each as often as it is there."""
    return (found & truth).total() / truth.total()


def _check(rows: Tensor) -> None:
    if len(rows) < 2 or not rows.isfinite().all():
        raise BadInput("labels follow from a finite gradient with a row for each of two classes or more")
