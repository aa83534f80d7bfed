"""Plans of FDSE that a site does not take: a server could choose weights that show one site alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.site.masked import Federation, algebra_of

from crossward.federation.contract import Plan
from crossward.site.messages import (
    BEGIN,
    Message,
)
from crossward.site.troubles import Code

pytestmark = pytest.mark.usefixtures("without_fsync", "small_sketches")

VICTIM = "site-01"


def fdse_request(made: Any, change: Callable[[dict[str, dict[str, Any]]], None]) -> tuple[Federation, Code]:
    """What a site says to a real request of FDSE's whose plan was changed."""
    federation: Federation = made(algebra_of("fdse"))
    codes: list[Code] = []

    def amend(task: str, site: str, message: Message) -> Message:
        if (task, site) != (BEGIN, VICTIM) or not message["sum"]["plan"]:
            return message
        plan = Plan.from_json(message["sum"]["plan"])
        values: dict[str, dict[str, Any]] = {group: dict(each) for group, each in plan.values.items()}
        change(values)
        changed = {**message, "sum": message["sum"] | {"plan": replace(plan, values=values).to_json()}}
        codes.append(federation.refusal(VICTIM, BEGIN, changed))
        return message

    federation.amend = amend
    federation.round()
    return federation, codes[0]


def one_site_alone(values: dict[str, dict[str, Any]]) -> None:
    weights = np.zeros_like(values["shared"]["weights"])
    weights[:, 1] = 1.0
    values["shared"]["weights"] = weights


def two_sites(values: dict[str, dict[str, Any]]) -> None:
    weights = np.zeros_like(values["shared"]["weights"])
    weights[:, 1:3] = 0.5
    values["shared"]["weights"] = weights


def only_the_victims_eraser(values: dict[str, dict[str, Any]]) -> None:
    attention = np.zeros_like(values["personal"]["attention"])
    attention[:, :, 1] = 1.0
    values["personal"]["attention"] = attention


def weights_below_zero(values: dict[str, dict[str, Any]]) -> None:
    values["shared"]["weights"] = values["shared"]["weights"] * 0 + np.array([2.0, -1.0, 0.0, 0.0])


def no_weights(values: dict[str, dict[str, Any]]) -> None:
    del values["shared"]


@pytest.mark.parametrize("change", [one_site_alone, two_sites, only_the_victims_eraser, weights_below_zero, no_weights])
def test_a_plan_that_would_show_one_sites_part_is_refused(made: Any, change: Any) -> None:
    federation, code = fdse_request(made, change)
    assert code is Code.BAD_TASK
    # The plan that the rules make is taken by the same site.
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)
