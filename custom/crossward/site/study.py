"""What is run: the same at every site, and the same again when a run is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossward.federation.errors import BadInput, CrosswardError
from crossward.imaging.data import Cohort
from crossward.methods.base import Method, Task
from crossward.methods.registry import create
from crossward.site.participant import Plugs
from crossward.site.trainer import Training


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that decides the result of a run; stored in its folder, and compared when it is resumed."""

    method: Method
    task: Task
    training: Training
    plugs: Plugs
    participation: float = 1.0
    quorum: int | None = None

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
            study = cls(
                method=create(given.pop("method"), **given.pop("options")),
                task=Task(**{**task, "classes": tuple(task["classes"])}),
                training=Training(**given.pop("training")),
                plugs=Plugs(**given.pop("plugs")),
                participation=float(given.pop("participation", 1.0)),
                quorum=given.pop("quorum", None),
            )
        except CrosswardError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"the study cannot be understood: {error}; write it with: crossward job export") from error
        if given:
            raise BadInput(f"the study has a part that this version does not know: {', '.join(sorted(given))}")
        return study

    def digest(self) -> str:
        """Hash the options: what has the same digest can be resumed."""
        return hashlib.sha256(json.dumps(self.options(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def usual(cls, method: Method, cohort: Cohort, *, rounds: int, seed: int, quorum: int | None = None) -> Study:
        """The study with default settings that suits a cohort."""
        task = Task(classes=cohort.classes, channels=cohort.channels, size=cohort.size, rounds=rounds, seed=seed)
        return cls(method=method, task=task, training=Training(seed=seed), plugs=Plugs(), quorum=quorum)
