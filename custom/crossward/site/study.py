"""What is run: the same at every site, and the same again when a run is resumed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import BadInput, CrosswardError
from crossward.federation.outliers import TIMES, Bound
from crossward.federation.scopes import Scope
from crossward.imaging.data import Cohort, SiteData
from crossward.methods.base import Method, Model, Task
from crossward.methods.registry import create, fits
from crossward.privacy.dp.accounting import Spending, epsilon
from crossward.privacy.dp.lines import Shared
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.site.devices import Device
from crossward.site.participant import Participant, Plugs
from crossward.site.protection import Book
from crossward.site.trainer import Training
from crossward.site.update_protection import noise_of, reach_of

Part = TypeVar("Part")

_AFTER_ROUNDS = 1
"""The last evaluation and the test are sums of a round after the last one."""


def _typed(kind: type[Part], **values: Any) -> Part:
    """Make a part of a study from values that are of the kinds that its fields say."""
    for name, hint in get_type_hints(kind).items():
        part = is_dataclass(hint)
        if name in values and not (isinstance(values[name], hint) if part else fits(values[name], hint)):
            raise TypeError(f"'{name}' is {values[name]!r}")
    return kind(**values)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that decides the result of a run; stored in its folder, and compared when it is resumed."""

    method: Method
    task: Task
    training: Training
    plugs: Plugs
    participation: float = 1.0
    quorum: int | None = None
    outlier: float = TIMES
    masking: Settings | None = None
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        Bound(self.outlier)
        self._check_privacy()
        if self.masking is None:
            return
        if self.method.under_masks(self.masking.fewest) != self.method:
            raise BadInput(
                f"{self.method.name} has options that secure aggregation does not allow; "
                "write the job with: crossward job export --secagg"
            )
        if self.masking.fewest < self.method.fewest_masked:
            raise BadInput(
                f"{self.method.name} under secure aggregation needs sums over at least {self.method.fewest_masked} "
                f"sites, not {self.masking.fewest}"
            )
        if self.masking.colluders > self.method.most_colluders:
            raise BadInput(
                f"{self.method.name} can hide a hospital from a server that works together with "
                f"{self.method.most_colluders} hospital, not {self.masking.colluders}; write the job with colluders "
                f"{self.method.most_colluders}, or with another method"
            )

    def _check_privacy(self) -> None:
        if self.privacy is None:
            return
        if self.task.norm != "group":
            raise BadInput("differential privacy takes GroupNorm (--norm group): BatchNorm mixes the images of a batch")
        if self.privacy.unit != "site" and self.method.under_privacy() != self.method:
            raise BadInput(
                f"{self.method.name} has options that differential privacy does not allow; "
                "write the job with: crossward job export --dp"
            )

        if not self.privacy.distributed:
            return
        if self.masking is None:
            raise BadInput("noise that sites share is enough in a sum only: it takes secure aggregation (--secagg)")
        algebra = self.method.algebra(self.task, self.model())
        personal = any(spec.scope is Scope.PERSONAL for spec in algebra.sent.values())
        if algebra.needs == "gram" or algebra.measured or personal:
            raise BadInput(
                f"{self.method.name} takes more of a site than its part of one sum, as to compare sites, where shared "
                "noise is less than it takes; use a method that does not, or leave out --dp-distributed"
            )

    def private(self, privacy: Privacy) -> Study:
        """The same study under differential privacy, with the normalisation and the options that it demands."""
        method = self.method if privacy.unit == "site" else self.method.under_privacy()
        return replace(self, method=method, task=replace(self.task, norm="group"), privacy=privacy)

    @property
    def shared(self) -> Shared | None:
        """With whom a site shares the noise, where sites do."""
        if self.masking is None or self.privacy is None or not self.privacy.distributed:
            return None
        return Shared(fewest=self.masking.fewest, colluders=self.masking.colluders)

    @property
    def reach(self) -> float | None:
        """How far a value of any site's update can be from 0, where sites share the noise."""
        if self.privacy is None:
            return None
        return reach_of(self.privacy, rounds=self.task.rounds, shared=self.shared)

    def masked(self, masking: Settings) -> Study:
        """The same study under secure aggregation, with the options that its method then demands."""
        fewest = max(masking.fewest, self.method.fewest_masked)
        stronger = replace(masking, min_sites=max(masking.min_sites, fewest), rounds=self.task.rounds + _AFTER_ROUNDS)
        if self.quorum is not None and self.quorum < 1:
            raise BadInput(f"a quorum of {self.quorum} is not at least 1")
        quorum = None if self.quorum is None else max(self.quorum, fewest)
        return replace(self, method=self.method.under_masks(fewest), masking=stronger, quorum=quorum)

    def options(self) -> dict[str, Any]:
        """The options as plain values."""
        options = {
            "method": self.method.name,
            "options": asdict(self.method),
            "task": asdict(self.task),
            "training": asdict(self.training),
            "plugs": asdict(self.plugs),
            "participation": self.participation,
            "quorum": self.quorum,
            "outlier": self.outlier,
            "masking": asdict(self.masking) if self.masking else None,
            "privacy": asdict(self.privacy) if self.privacy else None,
        }
        return dict(json.loads(json.dumps(options)))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Study:
        """Make the study that ``options()`` described.

        Raises:
            BadInput: a part is missing, unknown, or of the wrong kind.
        """
        try:
            given = dict(options)
            task = dict(given.pop("task"))
            classes = task["classes"]
            masking, privacy = given.pop("masking", None), given.pop("privacy", None)
            study = _typed(
                cls,
                method=create(given.pop("method"), **given.pop("options")),
                task=_typed(Task, **{**task, "classes": tuple(classes) if isinstance(classes, list) else classes}),
                training=_typed(Training, **given.pop("training")),
                plugs=_typed(Plugs, **given.pop("plugs")),
                participation=given.pop("participation", 1.0),
                quorum=given.pop("quorum", None),
                outlier=given.pop("outlier", TIMES),
                masking=None if masking is None else _typed(Settings, **masking),
                privacy=None if privacy is None else _typed(Privacy, **privacy),
            )
        except CrosswardError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"the study cannot be understood: {error}; write it with: crossward job export") from error
        if given:
            raise BadInput(f"the study has a part that this version does not know: {', '.join(sorted(given))}")
        return replace(study, participation=float(study.participation), outlier=float(study.outlier))

    def model(self) -> Model:
        """Build the model, scopes included; the same at the server and at every site."""
        return self.method.build(self.task, block=self.plugs.block, head=self.plugs.head)

    def coordinator(self, folder: Path, sites: Sequence[str]) -> Coordinator:
        """Make the server's side of a run of this study, at the common start."""
        model = self.model()
        return Coordinator(
            folder,
            self.method.algebra(self.task, model),
            self.method.start(self.task, model),
            sites=sites,
            rounds=self.task.rounds,
            seed=self.training.seed,
            participation=self.participation,
            quorum=self.quorum,
            outlier=self.outlier,
            study=self.digest(),
        )

    def participant(self, data: SiteData, folder: Path, *, device: Device, book: Book | None = None) -> Participant:
        """Make a site's side of a run of this study; ``book`` is where privacy that is spent is written down."""
        return Participant(
            data,
            self.method,
            self.task,
            training=self.training,
            folder=folder,
            device=device,
            plugs=self.plugs,
            privacy=self.privacy,
            book=book,
            shared=self.shared,
        )

    def digest(self) -> str:
        """Hash the options: what has the same digest can be resumed."""
        return hashlib.sha256(json.dumps(self.options(), sort_keys=True).encode()).hexdigest()

    def privacy_facts(self) -> dict[str, Any] | bool:
        """What a result says about differential privacy; false where there is none."""
        if self.privacy is None:
            return False
        facts = asdict(self.privacy)
        if self.shared is None:
            return facts
        noise, delta, rounds = noise_of(self.privacy, rounds=self.task.rounds), self.privacy.delta, self.task.rounds
        more = math.sqrt(self.shared.fewest / self.shared.honest)
        promised = {
            "epsilon": epsilon([Spending(noise, 1.0, rounds)], delta=delta),
            "epsilon_server_alone": epsilon([Spending(more * noise, 1.0, rounds)], delta=delta),
        }
        return {**facts, "shared": {**asdict(self.shared), **promised}}

    def trained_digest(self) -> str:
        """Hash what decides a site's update of a model, whatever the run or the job is called."""
        options = self.options()
        kept = {part: options[part] for part in ("method", "options", "task", "training", "plugs", "privacy")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @classmethod
    def usual(cls, method: Method, cohort: Cohort, *, rounds: int, seed: int, quorum: int | None = None) -> Study:
        """The study with default settings that suits a cohort."""
        task = Task(classes=cohort.classes, channels=cohort.channels, size=cohort.size, rounds=rounds, seed=seed)
        return cls(method=method, task=task, training=Training(seed=seed), plugs=Plugs(), quorum=quorum)
