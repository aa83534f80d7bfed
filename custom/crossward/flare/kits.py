"""Kits: one folder per participant with its certificate and its policy, made by FLARE's own provisioning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvflare.lighter.utils import load_yaml

from crossward.federation.errors import BadInput, RunFailure, StorageFailure

SERVER: Final = "server"
ADMIN: Final = "admin@crossward.example"

_STATIC: Final = "nvflare.lighter.impl.static_file.StaticFileBuilder"
_POLICY: Final = "crossward.flare.builder.SitePolicyBuilder"

BUILDERS: Final[list[dict[str, Any]]] = [
    {
        "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
        "args": {"template_file": ["master_template.yml"]},
    },
    {
        "path": _STATIC,
        "args": {"config_folder": "config", "scheme": "grpc", "require_signed_jobs": True},
    },
    {"path": "nvflare.lighter.impl.cert.CertBuilder", "args": {"root_valid_days": 3650}},
    {"path": _POLICY},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]
"""How a kit is made, for hospitals (provisioning/project.yml) as for one machine."""

_SITE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")
# A participant of one of these names would share its address or its folder with another.
_TAKEN: Final = frozenset({SERVER, "all", "client", "admin"})


@dataclass(frozen=True, kw_only=True)
class SiteKit:
    """What a hospital's kit says about its place: see the scope's properties in flare/builder.py.

    Attributes:
        data_root: the hospital's images; none: set later, by the hospital.
        state_root: its vault, outbox and journal; none: the folder ``state`` of its kit.
        publish_scores: whether its scores may stand in the result under its name.
        minimum_cell: scores over fewer images than this are not published.
        secure_aggregation: whether jobs must use it.
        minimum_sites: the fewest sites in a sum that the hospital is a part of.
        max_epsilon: the most that all jobs together may spend; 0: jobs need no differential privacy.
        max_delta: the largest delta of a job.
        privacy_unit: whose presence jobs under differential privacy hide.
        org: the organisation in its certificate.
        gpus: GPUs that jobs may ask for.
        gpu_memory: of each, in GiB.
    """

    data_root: Path | None = None
    state_root: Path | None = None
    publish_scores: bool = True
    minimum_cell: int = 10
    secure_aggregation: bool = True
    minimum_sites: int = 3
    max_epsilon: float = 0.0
    max_delta: float = 1e-5
    privacy_unit: str = "patient"
    org: str = "crossward"
    gpus: int = 0
    gpu_memory: int = 0

    def entry(self, name: str) -> dict[str, Any]:
        """The hospital's entry in project.yml."""
        return {
            "name": name,
            "type": "client",
            "org": self.org,
            "data_root": str(self.data_root.absolute()) if self.data_root else "",
            "state_root": str(self.state_root.absolute()) if self.state_root else "",
            "publish_scores": self.publish_scores,
            "minimum_cell": self.minimum_cell,
            "secure_aggregation": self.secure_aggregation,
            "minimum_sites": self.minimum_sites,
            "max_epsilon": self.max_epsilon,
            "max_delta": self.max_delta,
            "privacy_unit": self.privacy_unit,
            "capacity": {"num_of_gpus": self.gpus, "mem_per_gpu_in_GiB": self.gpu_memory},
        }


def write_project(
    path: Path,
    *,
    name: str,
    sites: Mapping[str, SiteKit],
    host: str,
    port: int,
    admin: str = ADMIN,
    org: str = "crossward",
) -> None:
    """Write a project file with one server, the sites and one administrator.

    Args:
        path: the file to write.
        name: of the project; certificates belong to it.
        sites: the hospitals by name.
        host: name or address under which sites reach the server.
        port: of the server, for sites and administrators alike.
        admin: the administrator's name, in the form of an e-mail address.
        org: the organisation of server and administrator.

    Raises:
        BadInput: a name that FLARE cannot take.
    """
    check_sites(sites)
    project = {
        "api_version": 3,
        "name": name,
        "description": "Crossward federation",
        "participants": [
            {
                "name": SERVER,
                "type": "server",
                "org": org,
                "default_host": host,
                "fed_learn_port": port,
                "admin_port": port,
            },
            *(kit.entry(site) for site, kit in sites.items()),
            {"name": admin, "type": "admin", "org": org, "role": "project_admin"},
        ],
        "builders": BUILDERS,
    }
    path.write_text(json.dumps(project, indent=2) + "\n", encoding="utf-8")  # JSON is YAML, too


def check_sites(sites: Mapping[str, object]) -> None:
    """Refuse names of sites that FLARE cannot take.

    Raises:
        BadInput: no site, or a name that is taken or has other characters than letters, digits, - and _.
    """
    if not sites:
        raise BadInput("a federation needs sites; none was named")
    for site in sites:
        if not _SITE_NAME.fullmatch(site) or site in _TAKEN:
            raise BadInput(
                f"'{site}' cannot be a site's name; take up to 63 letters, digits, - and _, "
                f"and none of {', '.join(sorted(_TAKEN))}"
            )


def provision(project: Path, out: Path) -> Path:
    """Make the kits of a project with ``nvflare provision``.

    A second call for the same project and folder keeps all certificates, adds those of new participants, and puts
    the kits into a new folder: the way to add a hospital.

    Args:
        project: the project file.
        out: folder for kits and for the project's keys.

    Returns:
        The folder with one kit per participant.

    Raises:
        BadInput: the project file is not there, is wrong, or would make kits without Crossward's policy.
        RunFailure: FLARE could not make the kits.
        StorageFailure: the folder cannot be written.
    """
    name = _checked_name(project)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailure(f"cannot make the folder {out}: {error.strerror}; choose another one") from None
    place = (out / name).resolve()
    before = set(place.glob("prod_*"))
    try:
        answer = _run_flare(project.resolve(), out.resolve())
    finally:
        _guard_keys(place / "state")
    made = sorted(set(place.glob("prod_*")) - before)
    if answer.returncode == 0 and made:
        return made[-1]
    if answer.returncode == 0:
        raise RunFailure(f"{place} is full: FLARE counts to prod_99. Move old prod_ folders away, and keep state/")
    # Four: FLARE did not take the file. What our builder refuses comes back with its traceback.
    wrong = answer.returncode == 4 or f"{BadInput.__name__}:" in answer.stderr
    raise (BadInput if wrong else RunFailure)(f"{project} did not become kits: {_reason(answer)}")


def _checked_name(project: Path) -> str:
    if not project.is_file():
        raise BadInput(f"there is no project file {project}; provisioning/project.yml is a template to copy")
    try:
        content = load_yaml(str(project))
    except Exception as error:
        raise BadInput(f"{project} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not isinstance(content.get("participants"), list):
        raise BadInput(f"{project} is no project file: it has no list of participants")
    name = content.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name):
        raise BadInput(f"{project}: the project's name '{name}' is not up to 63 letters, digits, - and _")
    builders = content.get("builders")
    steps = [step for step in builders if isinstance(step, dict)] if isinstance(builders, list) else []
    paths = [step.get("path") for step in steps]
    if _POLICY not in paths or _STATIC not in paths or paths.index(_POLICY) < paths.index(_STATIC):
        raise BadInput(
            f"{project}: {_POLICY} is not among the builders after {_STATIC}; without it kits have FLARE's open "
            "defaults. Take the builders of provisioning/project.yml"
        )
    if (steps[paths.index(_STATIC)].get("args") or {}).get("require_signed_jobs") is not True:
        raise BadInput(f"{project}: require_signed_jobs of {_STATIC} is not true; set it so")
    return name


def _run_flare(project: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # FLARE's command writes settings into the home folder of whoever calls it: it gets one to throw away. The mask
    # keeps keys from other users from the moment they are written.
    words = ["provision", "-p", str(project), "-w", str(out), "--force"]
    with tempfile.TemporaryDirectory(prefix="crossward-") as home:
        return subprocess.run(
            [sys.executable, "-m", "nvflare.cli", "--format", "json", *words],
            cwd=home,
            env={**os.environ, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            umask=0o077,
        )


def _reason(answer: subprocess.CompletedProcess[str]) -> str:
    """FLARE's own reason, in one line."""
    found = re.search(r"Exception (.*?) raised during provision", answer.stdout + answer.stderr, re.DOTALL)
    if found:
        return " ".join(found.group(1).split())
    try:
        said = json.loads(answer.stdout)
    except ValueError:
        said = {}
    text = said.get("detail") or said.get("message") or answer.stderr.strip() or answer.stdout.strip()
    return str(text).strip().splitlines()[-1] if str(text).strip() else f"exit code {answer.returncode}"


def _guard_keys(state: Path) -> None:
    # cert.json holds the root's private key and everybody's in clear text: who reads it can be any hospital.
    if state.is_dir():
        state.chmod(0o700)
        for file in state.iterdir():
            file.chmod(0o600)
