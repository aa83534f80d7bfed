"""Is a difference between scanners more than brightness? Plain yardsticks to hold a network against.

A network that fails at another hospital may only be misled by brightness and contrast. Two cheap rivals tell:
matching every film's histogram to the training hospital's, and a linear model on a dozen global numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.floating[Any]]

GLOBAL_NUMBERS = (
    "mean",
    "standard deviation",
    "minimum",
    "5th percentile",
    "25th percentile",
    "median",
    "75th percentile",
    "95th percentile",
    "maximum",
    "skewness",
    "kurtosis",
    "mean gradient",
)
QUANTILES = 256


def global_numbers(images: Array) -> Array:
    """Twelve numbers per image that know nothing of shape or place, in the order of ``GLOBAL_NUMBERS``.

    Args:
        images: [n, height, width].

    Returns:
        [n, 12]; skewness and kurtosis of a constant image are 0.
    """
    flat = images.reshape(len(images), -1).astype(np.float64)
    steps_down, steps_across = np.gradient(images.astype(np.float64), axis=(1, 2))
    # Takes seconds to import, and only this yardstick needs it.
    from scipy import stats

    shape = np.stack([stats.skew(flat, axis=1), stats.kurtosis(flat, axis=1)], axis=1)
    return np.concatenate(
        [
            flat.mean(1, keepdims=True),
            flat.std(1, keepdims=True),
            np.percentile(flat, (0, 5, 25, 50, 75, 95, 100), axis=1).T,
            np.where(np.isfinite(shape), shape, 0.0),
            np.hypot(steps_down, steps_across).mean((1, 2))[:, None],
        ],
        axis=1,
    )


def match_histogram(images: Array, reference: Array) -> Array:
    """Give every image the pooled histogram of the reference images; the order of its pixels stays.

    Args:
        images: [n, height, width], each matched on its own.
        reference: [m, height, width], pooled.

    Returns:
        The matched images, of the same shape; equal pixels stay equal.
    """
    levels = np.quantile(reference, np.linspace(0, 1, QUANTILES))
    from scipy import stats

    ranks = stats.rankdata(images.reshape(len(images), -1), axis=1) - 0.5
    share = ranks / ranks.shape[1]
    matched: Array = np.interp(share, np.linspace(0, 1, QUANTILES), levels).reshape(images.shape)
    return matched


def colour_numbers(images: Array) -> Array:
    """Twelve numbers per colour image: mean, standard deviation, 10th and 90th percentile of each channel.

    Args:
        images: [n, 3, height, width].

    Returns:
        [n, 12].
    """
    flat = images.reshape(len(images), images.shape[1], -1).astype(np.float64)
    low, high = np.percentile(flat, (10, 90), axis=2)
    return np.concatenate([flat.mean(2), flat.std(2), low, high], axis=1)


def plain_numbers(images: Array) -> Array:
    """The twelve numbers that suit the images [n, channels, height, width]: grey or colour."""
    return global_numbers(images[:, 0]) if images.shape[1] == 1 else colour_numbers(images)


def linear_probabilities(
    train_x: Array, train_y: NDArray[np.integer[Any]], test_x: Array, classes: int, *, decay: float = 1e-3
) -> Array:
    """Answers [m, classes] of a multinomial logistic regression on standardised features.

    Args:
        train_x: [n, features].
        train_y: class numbers from 0.
        test_x: [m, features].
        classes: number of classes.
        decay: weight of the squared weights in the loss, so that separable data have a finite answer.
    """
    mean, spread = train_x.mean(0), train_x.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    inputs, tests = (torch.from_numpy((x - mean) / spread).double() for x in (train_x, test_x))
    targets = torch.from_numpy(np.asarray(train_y, dtype=np.int64))
    layer = nn.Linear(inputs.shape[1], classes, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(layer(inputs), targets) + decay * layer.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        answers: Array = layer(tests).softmax(dim=1).numpy()
    return answers


def linear_accuracy(
    train_x: Array,
    train_y: NDArray[np.integer[Any]],
    test_x: Array,
    test_y: NDArray[np.integer[Any]],
    classes: int,
) -> float:
    """Test accuracy of ``linear_probabilities``."""
    answers = linear_probabilities(train_x, train_y, test_x, classes)
    return float((answers.argmax(axis=1) == test_y).mean())
