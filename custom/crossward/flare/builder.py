"""FLARE's provisioning, hardened: the policy files of every kit, the same for a hospital and for one machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from nvflare.lighter.constants import DEFINED_ROLES
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.spec import Builder

from crossward.federation.errors import BadInput
from crossward.flare import names
from crossward.privacy.dp.settings import UNITS
from crossward.site.payloads import PAYLOADS

STORAGE: Final = "storage"
"""Folder of the server's kit that keeps jobs and snapshots."""

# FLARE takes no relative path here. Its server and its job processes change into their kit before they read this
# file, and the path is made a real one at once, so a kit works wherever it is unpacked.
HERE: Final = "/proc/self/cwd"

PROPERTIES: Final[Mapping[str, Any]] = {
    "data_root": "",
    "state_root": "",
    "publish_scores": True,
    "minimum_cell": 10,
    "secure_aggregation": True,
    "minimum_sites": 3,
    "max_epsilon": 0.0,
    "max_delta": 1e-5,
    "min_noise": 0.0,
    "privacy_unit": "patient",
    "payloads": list(PAYLOADS),
}
"""What a hospital's entry in project.yml may say about its scope, and what holds where it says nothing."""

# No role has these, whatever category they belong to: code in a job, files and settings of a machine by remote
# command, and FLARE's side doors to a running job.
NEVER: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "byoc",
        "server-predeployed-flwr",
        "shell_commands",
        "call",
        "app_command",
        "report_env",
        "configure_site_log",
        "configure_job_log",
    ),
    "none",
)

# What a running job answers to these is text and figures of a site that no gate has seen. The server's own answer
# to show_stats is the federation's progress, and stays.
UNGATED: Final[Mapping[str, str]] = dict.fromkeys(("show_stats", "show_errors", "reset_errors"), "none")

_OWN_JOBS: Final = ("clone_job", "manage_job", "download_job", "list_job", "get_job_log")

SERVER_RIGHTS: Final[Mapping[str, Mapping[str, str]]] = {
    "project_admin": {
        "submit_job": "any",
        **dict.fromkeys(_OWN_JOBS, "any"),
        "view": "any",
        "report_version": "any",
        "operate": "any",
    },
    "org_admin": {
        "submit_job": "none",
        **dict.fromkeys(_OWN_JOBS, "o:submitter"),
        "clone_job": "none",
        "view": "any",
        "report_version": "any",
        "operate": "o:site",
    },
    "lead": {
        "submit_job": "any",
        **dict.fromkeys(_OWN_JOBS, "n:submitter"),
        "view": "any",
        "report_version": "any",
        "operate": "none",
    },
    "member": {"view": "any"},
}
"""Who may do what at the server; NEVER comes on top."""

# submit_job: a site asks its own policy about the submitter when the server deploys a job. operate: only people of
# the site's own organisation stop or restart it.
SITE_RIGHTS: Final[Mapping[str, Mapping[str, str]]] = {
    "project_admin": {"submit_job": "any", "view": "any", "report_version": "any", "operate": "o:site"},
    "org_admin": {"submit_job": "none", "view": "any", "report_version": "any", "operate": "o:site"},
    "lead": {"submit_job": "any", "view": "any", "report_version": "any", "operate": "none"},
    "member": {"view": "any"},
}
"""Who may do what at a hospital; NEVER and UNGATED come on top."""


class SitePolicyBuilder(Builder):
    """Writes resources.json, authorization.json and privacy.json of the server and of every hospital.

    It comes after FLARE's StaticFileBuilder, whose open defaults it replaces; they are removed, since FLARE would
    fall back to them if a policy file were deleted.
    """

    def initialize(self, project: Project, ctx: ProvisionContext) -> None:  # noqa: ARG002
        """Refuse what would make a kit weaker than it looks, before a key is made."""
        for admin in project.get_admins():
            role = admin.get_prop("role")
            # FLARE lets the undocumented role "super" do everything, whatever the policy says.
            if role not in DEFINED_ROLES:
                raise BadInput(f"{admin.name}: the role '{role}' is not one of {', '.join(DEFINED_ROLES)}")
        for client in project.get_clients():
            _properties(client)

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Write the policy files of every kit."""
        server = project.get_server()
        local = Path(ctx.get_local_dir(server))
        _write(local / "resources.json", _server_resources(_defaults(local)))
        _write(local / "authorization.json", _authorization(SERVER_RIGHTS, NEVER))
        _write(local / "privacy.json", _privacy({"state_root": ""}, gate=False))
        _tidy(local)
        for client in project.get_clients():
            local = Path(ctx.get_local_dir(client))
            _write(local / "resources.json", _site_resources(_defaults(local)))
            _write(local / "authorization.json", _authorization(SITE_RIGHTS, {**NEVER, **UNGATED}))
            _write(local / "privacy.json", _privacy(_properties(client), gate=True))
            _tidy(local)


def _server_resources(resources: dict[str, Any]) -> dict[str, Any]:
    resources["class_allow_list"] = list(names.SERVER_CLASSES)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = f"{HERE}/{STORAGE}/snapshots"
    components = {component["id"]: component for component in resources["components"]}
    # Nothing is streamed to it; without it, nothing can be.
    del components["log_receiver"]
    # A site trains one job at a time: it has one vault, and mostly one GPU.
    components["job_scheduler"]["args"]["max_jobs"] = 1
    components["job_manager"]["args"]["uri_root"] = f"{STORAGE}/jobs"
    components["job_store"]["args"] = {"root_dir": HERE}
    resources["components"] = list(components.values())
    return resources


def _site_resources(resources: dict[str, Any]) -> dict[str, Any]:
    resources["class_allow_list"] = list(names.SITE_CLASSES)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False
    components = {component["id"]: component for component in resources["components"]}
    del components["site_log_streamer"]
    resources["components"] = list(components.values())
    return resources


def _authorization(rights: Mapping[str, Mapping[str, str]], never: Mapping[str, str]) -> dict[str, Any]:
    # A role written as one word ("any") would get every right that is not named: each has its full list.
    return {"format_version": "1.0", "permissions": {role: {**granted, **never} for role, granted in rights.items()}}


def _privacy(properties: Mapping[str, Any], *, gate: bool) -> dict[str, Any]:
    filters = [{"path": names.GATE, "args": {}}] if gate else []
    scope = {
        "name": names.SCOPE,
        "properties": dict(properties),
        "task_data_filters": [],
        "task_result_filters": filters,
    }
    return {"scopes": [scope], "default_scope": names.SCOPE}


def _properties(client: Participant) -> dict[str, Any]:
    """The scope's properties that a hospital's entry in project.yml gives, checked."""
    for key in client.props:
        meant = get_close_matches(key, PROPERTIES, n=1, cutoff=0.8)
        if meant and meant[0] != key:
            raise BadInput(f"{client.name}: '{key}' is not a setting; '{meant[0]}' is")
    found = {key: client.get_prop(key, usual) for key, usual in PROPERTIES.items()}
    for key in ("data_root", "state_root"):
        place = found[key]
        if not isinstance(place, str) or (place and not Path(place).is_absolute()):
            raise BadInput(f"{client.name}: {key} '{place}' is not a full path; write it from /, or leave it empty")
    for key in ("publish_scores", "secure_aggregation"):
        if not isinstance(found[key], bool):
            raise BadInput(f"{client.name}: {key} is true or false, not '{found[key]}'")
    for key, least in (("minimum_cell", 1), ("minimum_sites", 2)):
        if isinstance(found[key], bool) or not isinstance(found[key], int) or found[key] < least:
            raise BadInput(f"{client.name}: {key} '{found[key]}' is not a whole number from {least}")
    for key, most in (("max_epsilon", math.inf), ("max_delta", 0.1), ("min_noise", math.inf)):
        # YAML takes 1e-5 for a word: numbers have a point there.
        value = found[key] = _number(found[key])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
            raise BadInput(f"{client.name}: {key} '{value}' is not a number from 0, below {most:g}")
    if not isinstance(found["privacy_unit"], str) or found["privacy_unit"] not in UNITS:
        raise BadInput(f"{client.name}: privacy_unit is {', '.join(UNITS)}, not '{found['privacy_unit']}'")
    kinds = found["payloads"]
    if not isinstance(kinds, list) or any(kind not in PAYLOADS for kind in kinds):
        raise BadInput(f"{client.name}: payloads is a list of {', '.join(PAYLOADS)}, not '{kinds}'")
    return found


def _number(value: Any) -> Any:
    """A number that was read as a word; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _defaults(local: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    return loaded


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tidy(local: Path) -> None:
    for name in ("resources.json.default", "authorization.json.default", "privacy.json.sample"):
        (local / name).unlink()
