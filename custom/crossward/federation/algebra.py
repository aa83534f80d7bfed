"""The one algebra that every method runs on, in the open and under masks.

It binds a model's layout to combining rules and offers the steps of a round as pure functions:
``measure`` (site) -> ``totals`` -> ``plan`` (server) -> ``contribute`` (server in the open, site under masks)
-> sums -> ``next_value`` (server). Nothing here knows who calls it, or how messages travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossward.federation.contract import (
    ALL,
    CORRECT,
    LOSS,
    MOST_IMAGES,
    SAMPLES,
    SEEN,
    Contribution,
    Needs,
    Plan,
    Report,
    Share,
    State,
    Summed,
    Tally,
    Tensors,
    Vector,
)
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.rules import Rule
from crossward.federation.scopes import Layout, Scope, TensorSpec

_STRENGTH: dict[Needs, int] = {"nothing": 0, "totals": 1, "gram": 2}


@dataclass(frozen=True)
class Extra:
    """A tensor that a site reports beside its model, such as class prototypes, and the rule that combines it."""

    shape: tuple[int, ...]
    rule: Rule


class Algebra:
    """A layout bound to its combining rules.

    Args:
        layout: every tensor of the model with its scope.
        rules: a rule for each scope that leaves the site and occurs in the layout.
        extras: declared tensors beside the model.
    """

    def __init__(self, layout: Layout, rules: Mapping[Scope, Rule], extras: Mapping[str, Extra] | None = None) -> None:
        extras = extras or {}
        self.layout = dict(layout)
        self.extras = dict(extras)
        self._rules: dict[str, Rule] = {}
        self._group_of: dict[str, str] = {}
        self.sent: dict[str, TensorSpec] = {}
        for name, spec in layout.items():
            if not spec.scope.leaves:
                continue
            if spec.scope not in rules:
                raise PrivacyRefusal(
                    f"tensor '{name}' is {spec.scope}, but the method has no rule to combine that scope"
                )
            self._declare(name, spec, group=spec.scope.value, rule=rules[spec.scope])
        for name, extra in extras.items():
            if name in layout or name in set(Scope):
                raise PrivacyRefusal(f"extra '{name}' has the name of a tensor of the model, or of a scope")
            self._declare(name, TensorSpec(Scope.SHARED, extra.shape), group=name, rule=extra.rule)
        self.measured = {key: value.shape for key, value in self.measure(self._nothing()).items()}
        """The numbers about updates that rules need, with their shapes."""
        self.tallies = dict.fromkeys((SAMPLES, LOSS, SEEN, CORRECT), (1,)) | self.measured
        self.needs: Needs = max(
            (rule.needs for rule in self._rules.values()), key=_STRENGTH.__getitem__, default="nothing"
        )

    def _nothing(self) -> dict[str, Tensor]:
        """An update of zeros that takes no memory."""
        return {name: torch.zeros(()).expand(spec.shape) for name, spec in self.sent.items()}

    @property
    def streams(self) -> bool:
        """Whether a contribution can be added as it arrives: nothing to wait for, and one slot for all."""
        return self.needs == "nothing" and all(spec.scope is not Scope.PERSONAL for spec in self.sent.values())

    def _declare(self, name: str, spec: TensorSpec, *, group: str, rule: Rule) -> None:
        self.sent[name] = spec
        self._group_of[name] = group
        self._rules[group] = rule

    def _names(self, group: str) -> list[str]:
        return [name for name, owner in self._group_of.items() if owner == group]

    def rules(self) -> dict[str, Rule]:
        """The rule of every group of tensors that leaves a site: of a scope, or of an extra by its name."""
        return dict(self._rules)

    def blocks(self) -> dict[str, tuple[str, ...]]:
        """List the blocks of tensors whose cosines the plan needs, as ``group/block``."""
        return {
            f"{group}/{block}": tuple(names)
            for group, rule in self._rules.items()
            for block, names in rule.blocks(self._names(group)).items()
        }

    def measure(self, update: Tensors) -> dict[str, Vector]:
        """Compute the rules' own tallies of an update, as ``group/key``."""
        tally: dict[str, Vector] = {}
        for group, rule in self._rules.items():
            own = {name: update[name] for name in self._names(group)}
            tally.update({f"{group}/{key}": value for key, value in rule.measure(own).items()})
        return tally

    def check(self, report: Report) -> None:
        """Refuse a report that is not exactly what was declared.

        Raises:
            PrivacyRefusal: an undeclared, missing, misshapen or non-finite tensor, one that is not float32, a tally
                that is not finite, or a number of images that cannot be one.
        """
        undeclared = sorted(set(report.update) - set(self.sent))
        missing = sorted(set(self.sent) - set(report.update))
        place = f"{report.site}, round {report.round_number}"
        if undeclared:
            raise PrivacyRefusal(f"{place}: the report carries '{undeclared[0]}', which may not leave the site")
        if missing:
            raise PrivacyRefusal(f"{place}: the report lacks '{missing[0]}'")
        for name, tensor in report.update.items():
            if tensor.dtype != torch.float32:
                raise PrivacyRefusal(f"{place}: '{name}' is {tensor.dtype}, and only float32 may leave a site")
            if tuple(tensor.shape) != self.sent[name].shape:
                raise PrivacyRefusal(
                    f"{place}: '{name}' has shape {tuple(tensor.shape)} and {self.sent[name].shape} was declared"
                )
            if not torch.isfinite(tensor).all():
                raise PrivacyRefusal(f"{place}: '{name}' has values that are not finite; the report is not used")
        for key, value in report.tally.items():
            if value.shape != self.tallies.get(key):
                raise PrivacyRefusal(f"{place}: tally '{key}' of shape {value.shape} was not declared")
            if not np.isfinite(value).all():
                raise PrivacyRefusal(f"{place}: tally '{key}' is not finite; the report is not used")
        absent = sorted(set(self.tallies) - set(report.tally) - {LOSS, SEEN, CORRECT})
        if absent:
            raise PrivacyRefusal(f"{place}: the report lacks the tally '{absent[0]}'")
        for key in (SAMPLES, SEEN, CORRECT):
            count = float(report.tally[key].item()) if key in report.tally else 0.0
            if not (0 <= count < MOST_IMAGES and count.is_integer()):
                raise PrivacyRefusal(f"{place}: '{key}' is {count:g}, which is no number of images")

    def plan(self, round_number: int, cohort: Sequence[str], totals: Tally, gram: Mapping[str, Vector]) -> Plan:
        """Let every rule plan from its part of the totals and of the Gram matrices."""
        values = {
            group: planned
            for group, rule in self._rules.items()
            if (planned := rule.plan({**totals, **_part(totals, group)}, _part(gram, group)))
        }
        return Plan(round_number, tuple(cohort), values)

    def bounded(self, plan: Plan, totals: Tally, gram: Mapping[str, Vector]) -> dict[str, float]:
        """Count what the rules' bounds changed in a plan, as ``group/key``."""
        return {
            f"{group}/{key}": count
            for group, rule in self._rules.items()
            for key, count in rule.bounded(
                plan.values.get(group, {}), {**totals, **_part(totals, group)}, _part(gram, group)
            ).items()
        }

    def check_plan(self, plan: Plan) -> None:
        """Refuse, on site, a published plan that these rules never make: what is masked by it might not be hidden.

        Raises:
            PrivacyRefusal: it is about unknown groups, or a rule refuses its part.
        """
        unknown = sorted(set(plan.values) - set(self._rules))
        if unknown:
            raise PrivacyRefusal(
                f"the plan of round {plan.round_number} is about '{unknown[0]}', which is unknown here"
            )
        for group, rule in self._rules.items():
            try:
                rule.check_plan(plan.values.get(group, {}), len(plan.cohort))
            except PrivacyRefusal as refusal:
                raise PrivacyRefusal(f"the plan of round {plan.round_number} for '{group}': {refusal}") from refusal

    def contribute(self, report: Report, plan: Plan, me: int) -> Contribution:
        """Multiply a report out into slots. The report's update may be a part of the whole: tensors are independent."""
        slots: dict[str, dict[str, Share]] = {}
        tallies = {group: {**report.tally, **_part(report.tally, group)} for group in self._rules}
        for name, value in report.update.items():
            group = self._group_of[name]
            coefficients = self._rules[group].coefficients(
                name, tallies[group], plan.values.get(group, {}), plan.cohort, me
            )
            for slot, coefficient in coefficients.items():
                slots.setdefault(slot, {})[name] = Share(_plain(coefficient), value)
        return slots

    def next_value(self, name: str, state: State, slot: str, summed: Summed, plan: Plan) -> Tensor:
        """Make the next value of one tensor in one slot."""
        group = self._group_of[name]
        own = {} if slot == ALL else state.personal.get(slot, {})
        current = own.get(name, state.tensors.get(name))
        if current is None:
            current = torch.zeros(summed.value.shape)
        return self._rules[group].advance(name, current, summed, plan.values.get(group, {}))


def total(tallies: Iterable[Tally]) -> dict[str, Vector]:
    """Add tallies up, key by key."""
    sums: dict[str, Vector] = {}
    for tally in tallies:
        for key, value in tally.items():
            sums[key] = sums[key] + value if key in sums else np.array(value, dtype=np.float64)
    return sums


def _plain(coefficient: float | Vector) -> float | Vector:
    return np.asarray(coefficient, dtype=np.float64) if isinstance(coefficient, np.ndarray) else float(coefficient)


def _part(values: Mapping[str, Vector], group: str) -> dict[str, Vector]:
    prefix = f"{group}/"
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
