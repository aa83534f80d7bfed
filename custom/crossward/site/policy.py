"""What a site allows and where its things are: set by the site's administrator, never by a job."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossward.privacy.dp.accounting import Budget
from crossward.privacy.dp.settings import UNITS, Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.site.payloads import PAYLOADS
from crossward.site.troubles import Code, Refusal

_KINDS: dict[str, type] = {
    "data_root": str,
    "state_root": str,
    "publish_scores": bool,
    "minimum_cell": int,
    "secure_aggregation": bool,
    "minimum_sites": int,
    "max_epsilon": float,
    "max_delta": float,
    "min_noise": float,
    "privacy_unit": str,
    "payloads": list,
}
_PATHS = ("data_root", "state_root")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A site's own settings.

    Attributes:
        data_root: folder with this site's images; None where the administrator has not named one.
        state_root: where vault, outbox and journal are kept, outside FLARE's run folders.
        publish_scores: whether the server gets this site's scores on its test images.
        minimum_cell: scores on fewer test images (patients, under differential privacy) than this are not published.
        secure_aggregation: whether a job must use it; no job can turn it off then.
        minimum_sites: the fewest sites in a sum that this site is a part of.
        max_epsilon: of all jobs together; a job must use differential privacy where this is above 0, and no job can
            turn it off.
        max_delta: of a job.
        min_noise: of a step of training, named by a job or worked out here from its epsilon; a job must use
            differential privacy where this is above 0.
        privacy_unit: whose presence a job under differential privacy hides: an image's, a patient's or the site's.
        payloads: kinds of what may leave the site, in the open or under masks.
    """

    data_root: Path | None
    state_root: Path
    publish_scores: bool = True
    minimum_cell: int = 10
    secure_aggregation: bool = True
    minimum_sites: int = 3
    max_epsilon: float = 0.0
    max_delta: float = 1e-5
    min_noise: float = 0.0
    privacy_unit: str = "patient"
    payloads: tuple[str, ...] = PAYLOADS

    @property
    def budget(self) -> Budget | None:
        """What all jobs together may spend; no limit of the site's own where it names none."""
        return Budget(self.max_epsilon, self.max_delta) if self.max_epsilon else None

    @classmethod
    def from_properties(
        cls, properties: Mapping[str, Any], *, kit: Path, data: str | None = None, state: str | None = None
    ) -> Policy:
        """Read the policy from a kit's privacy scope.

        Args:
            properties: of the scope; a relative path counts from the kit.
            kit: the site's kit.
            data: where the administrator named the data folder in the environment instead.
            state: likewise for the state.

        Raises:
            Refusal: a setting is unknown or of the wrong kind: a policy that is not understood allows nothing.
        """
        numbers = [name for name, kind in _KINDS.items() if kind is float and type(properties.get(name)) is int]
        properties = {**properties, **{name: float(properties[name]) for name in numbers}}
        for name, value in properties.items():
            if name not in _KINDS or type(value) is not _KINDS[name]:
                raise Refusal(Code.POLICY)
            if type(value) is float and not 0 <= value < math.inf:
                raise Refusal(Code.POLICY)
        if properties.get("minimum_cell", 0) < 0 or properties.get("minimum_sites", 2) < 2:
            raise Refusal(Code.POLICY)
        if properties.get("privacy_unit", "patient") not in UNITS:
            raise Refusal(Code.POLICY)
        payloads = properties.get("payloads", PAYLOADS)
        if any(kind not in PAYLOADS for kind in payloads):
            raise Refusal(Code.POLICY)
        named = data or properties.get("data_root") or None
        return cls(
            data_root=kit / named if named else None,
            state_root=kit / (state or properties.get("state_root") or "state"),
            **{name: value for name, value in properties.items() if name not in (*_PATHS, "payloads")},
            payloads=tuple(payloads),
        )

    def check_masking(self, masking: Settings | None) -> None:
        """Hold a job's secure aggregation against what this site demands.

        Raises:
            Refusal: the job is weaker.
        """
        if masking is None:
            if self.secure_aggregation:
                raise Refusal(Code.OPEN_JOB)
        elif masking.colluders < 1:
            raise Refusal(Code.TRUSTING_JOB)
        elif masking.fewest < self.minimum_sites:
            raise Refusal(Code.SMALL_SUMS, sites=masking.fewest, needed=self.minimum_sites)

    def check_privacy(self, privacy: Privacy | None) -> None:
        """Hold a job's differential privacy against what this site demands.

        Raises:
            Refusal: the job is weaker.
        """
        if privacy is None:
            if self.max_epsilon:
                raise Refusal(Code.NO_PRIVACY, allowed=self.max_epsilon)
            self._check_noise(0.0)
            return
        if privacy.unit != self.privacy_unit:
            raise Refusal(Code.OTHER_UNIT)
        if self.max_epsilon and privacy.epsilon is not None and privacy.epsilon > self.max_epsilon:
            raise Refusal(Code.WEAK_PRIVACY, epsilon=privacy.epsilon, allowed=self.max_epsilon)
        if privacy.delta > self.max_delta:
            raise Refusal(Code.LARGE_DELTA, delta=privacy.delta, allowed=self.max_delta)
        if privacy.noise is not None:
            self._check_noise(privacy.noise)

    def check_payloads(self, needed: Collection[str]) -> None:
        """Hold what a job lets out against what may leave this site.

        Raises:
            Refusal: the site keeps some of it.
        """
        if not set(needed) <= set(self.payloads):
            raise Refusal(Code.KEPT_PAYLOAD)

    def check_worked_out(self, noise: float) -> None:
        """Hold noise that follows from a job's epsilon and the number of patients against what this site demands.

        Raises:
            Refusal: it is less. How much it is stays here: the number of patients could be worked out from it.
        """
        if not noise >= self.min_noise:
            raise Refusal(Code.LARGE_EPSILON, allowed=self.min_noise)

    def _check_noise(self, noise: float) -> None:
        # Not "less than": what is no number must not pass.
        if not noise >= self.min_noise:
            raise Refusal(Code.LITTLE_NOISE, noise=noise, allowed=self.min_noise)

    def publishes(self, n_test: float) -> bool:
        """Whether scores on so many test images may leave."""
        return self.publish_scores and n_test >= self.minimum_cell

    def run_folder(self, run: str) -> Path:
        """Where this site keeps what belongs to a run."""
        return self.state_root / "runs" / run
