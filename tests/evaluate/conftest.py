from __future__ import annotations

import numpy as np
import pytest

from crossward.evaluate.facts import versions
from crossward.evaluate.metrics import score, summarise
from crossward.evaluate.transfer import measured

CLASSES = ("healthy", "nodule")


def chances(values):
    return [[1 - value, value] for value in values]


def make_result(names=("North", "South", "West"), **changes):
    """A small finished run: the last site has test images of one class only and missed round 2."""
    sites = {}
    for index, name in enumerate(names):
        labels = [0, 0, 0, 0] if index == len(names) - 1 else [0, 1, 0, 1]
        right = [0.9 if label else 0.1 for label in labels]
        guesses = [1 - right[0], *right[1:]] if index else right
        sites[name] = {
            "n_train": 10 + index,
            "n_val": 4,
            "n_test": 4,
            "scanner": f"Scanner {index}",
            **score(chances(guesses), labels, CLASSES),
            "as_received": score(chances([0.1] * 4), labels, CLASSES),
        }
    rounds = []
    for number in (1, 2, 3):
        entry = {"status": "reported", "val_accuracy": 0.25 * number, "val_accuracy_as_received": 0.125 * number}
        taking_part = {name: dict(entry) for name in names}
        if number == 2:
            taking_part[names[-1]] = {"status": "absent"}
        rounds.append(
            {"round": number, "seconds": 1.25, "bytes_up": 1_234_000, "bytes_down": 987, "sites": taking_part}
        )
    matrix = (np.eye(len(names)) * 0.5 + 0.25).tolist()
    matrix[0][-1] = None
    return {
        "method": "fedavg",
        "data": {"path": "phantoms", "kind": "hospitals", "classes": list(CLASSES), "phantom": True, "size": 32},
        "options": {"seed": 3, "optimiser": {"name": "sgd", "rate": 0.03}},
        "rounds": rounds,
        "best_round": 3,
        "sites": sites,
        "summary": summarise(sites),
        "cross_site": measured(names, matrix, [site["scanner"] for site in sites.values()]),
        "privacy": {"secagg": False, "dp": False, "epsilon": dict.fromkeys(names)},
        "warnings": [],
        "versions": versions(),
        "seconds": 83.0,
    } | changes


@pytest.fixture
def make():
    return make_result
