"""The vault: what never leaves a site, and the models that the site may deploy.

``local-RRRR`` holds the local tensors after training in round R; ``model-RRRR`` the whole model as it stood when the
site received the result of round R; ``keys-RRRR`` what opens this site's part of that result under secure
aggregation. Files are written atomically, and nothing that a retry could need is
deleted: the local tensors of the round before stay until the next result has arrived.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from crossward.federation.contract import Tensors
from crossward.federation.errors import OtherStudy
from crossward.federation.storage import (
    atomic_file,
    private_folder,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)

_FORMAT = "crossward.vault/1"
_NAME = re.compile(r"(local|model|keys)-(\d{4,})\.(?:safetensors|json)")


class Vault:
    """One site's vault for one run.

    Args:
        folder: made with mode 0700; chosen by the site, never by a job.
        study: digest of what is run, the model's layout included; files of another study are refused.
    """

    def __init__(self, folder: Path, *, study: str) -> None:
        self._folder = private_folder(folder)
        self._study = study

    def keep_local(self, round_number: int, tensors: Tensors) -> None:
        """Store the local tensors as they are after training in a round."""
        self._write(self._path("local", round_number), tensors)

    def local(self, *, before: int) -> dict[str, Tensor]:
        """The local tensors of the last round that this site trained in before the given one; none at the start."""
        rounds = [number for number in self._rounds("local") if number < before]
        return self._read(self._path("local", max(rounds))) if rounds else {}

    def keep_model(self, round_number: int, tensors: Tensors) -> None:
        """Store the whole model as received after a round."""
        self._write(self._path("model", round_number), tensors)

    def model(self, round_number: int) -> dict[str, Tensor]:
        """The whole model as it was received after a round."""
        return self._read(self._path("model", round_number))

    def latest_model(self) -> dict[str, Tensor]:
        """The whole model of the last round whose result was received; none at the start."""
        rounds = self._rounds("model")
        return self.model(rounds[-1]) if rounds else {}

    def keep_keys(self, round_number: int, keys: Mapping[str, Any]) -> None:
        """Store what opens this site's part of a round's result: the result may arrive in another job."""
        write_json(self._keys_path(round_number), keys)

    def keys(self, round_number: int) -> dict[str, Any]:
        """What opens this site's part of a round's result; nothing where the site was not in its sum."""
        path = self._keys_path(round_number)
        return read_json(path) if path.exists() else {}

    def keep_counts(self, what: str, round_number: int, counts: Mapping[str, Any]) -> None:
        """Store noisy counts: they are given again as they are, and not drawn anew."""
        write_json(self._folder / f"{what}-{round_number:04d}.json", counts)

    def counts(self, what: str, round_number: int) -> dict[str, Any]:
        """Noisy counts of a round; nothing where there are none."""
        path = self._folder / f"{what}-{round_number:04d}.json"
        return read_json(path) if path.exists() else {}

    def secret(self) -> bytes:
        """32 random bytes of this site and run, drawn once."""
        path = self._folder / "secret"
        if not path.exists():
            with atomic_file(path) as stream:
                stream.write(secrets.token_bytes(32))
        return path.read_bytes()

    def promote(self, tensors: Tensors) -> Path:
        """Store the model that the site deploys."""
        path = self._folder / "deployed.safetensors"
        self._write(path, tensors)
        return path

    def tidy(self, *, received: int, best: int | None) -> None:
        """Delete what can no longer be needed, now that the result of round ``received`` is here."""
        for number in self._rounds("model"):
            if number not in (received, best):
                self._path("model", number).unlink(missing_ok=True)
        for number in self._rounds("keys"):
            if number <= received and (number != best or self._path("model", number).exists()):
                self._keys_path(number).unlink(missing_ok=True)
        trained = [number for number in self._rounds("local") if number <= received]
        needed = set(trained[-2:])
        if best is not None and not self._path("model", best).exists():
            # The best model has not been here: it may come at the end, and is then joined with what was trained for it.
            needed.update([number for number in trained if number <= best][-1:])
        for number in set(trained) - needed:
            self._path("local", number).unlink(missing_ok=True)

    def _path(self, kind: str, round_number: int) -> Path:
        return self._folder / f"{kind}-{round_number:04d}.safetensors"

    def _keys_path(self, round_number: int) -> Path:
        return self._folder / f"keys-{round_number:04d}.json"

    def _rounds(self, kind: str) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[2]) for match in found if match and match[1] == kind)

    def _write(self, path: Path, tensors: Tensors) -> None:
        write_tensors(path, tensors, {"format": _FORMAT, "study": self._study})

    def _read(self, path: Path) -> dict[str, Tensor]:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _FORMAT or metadata.get("study") != self._study:
            raise OtherStudy(f"{path} was written for another study or version; it is left as it is, and not used")
        return tensors
