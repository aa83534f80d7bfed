"""The outbox: a report is on disk before it is answered, and is answered again rather than trained again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from crossward.federation.contract import Report, Tally
from crossward.federation.errors import OtherStudy
from crossward.federation.storage import private_folder, read_tensors, write_tensors

_FORMAT = "crossward.report/2"
_NAME = re.compile(r"report-(\d{4,})-[0-9a-f]+\.safetensors")


class Outbox:
    """One site's reports of one run, kept under (round, digest of the model received).

    Args:
        folder: made with mode 0700.
        study: digest of what is run; a report of another study is not answered.
    """

    def __init__(self, folder: Path, *, study: str = "") -> None:
        self._folder = private_folder(folder)
        self._study = study

    def put(self, report: Report) -> None:
        """Write a report; when this returns, it is on disk."""
        metadata = {
            "format": _FORMAT,
            "site": report.site,
            "study": self._study,
            "model": report.model,
            "tally": _written(report.tally),
            "validation": _written(report.validation),
        }
        write_tensors(self._path(report.round_number, report.model), report.update, metadata)

    def get(self, round_number: int, model: str) -> Report | None:
        """The report that was made for this round from this model, if there is one."""
        path = self._path(round_number, model)
        if not path.exists():
            return None
        update, metadata = read_tensors(path)
        if (metadata.get("format"), metadata.get("model"), metadata.get("study")) != (_FORMAT, model, self._study):
            raise OtherStudy(f"{path} is not a report for this study and model; move it away and try again")
        tally, validation = (_read(metadata[part]) for part in ("tally", "validation"))
        return Report(metadata["site"], round_number, model, update, tally, validation)

    def tidy(self, *, received: int) -> None:
        """Delete reports of rounds whose result has arrived."""
        for path in self._folder.iterdir():
            if (name := _NAME.fullmatch(path.name)) and int(name[1]) <= received:
                path.unlink(missing_ok=True)

    def _path(self, round_number: int, model: str) -> Path:
        return self._folder / f"report-{round_number:04d}-{model[:16]}.safetensors"


def _written(tally: Tally) -> str:
    return json.dumps({key: value.tolist() for key, value in tally.items()}, allow_nan=False)


def _read(text: str) -> Tally:
    return {key: np.array(value, dtype=np.float64) for key, value in json.loads(text).items()}
