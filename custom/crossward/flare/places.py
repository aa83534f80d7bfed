"""Where a FLARE process keeps our things, and under which policy: asked of the site's kit, never of the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext

from crossward.flare.names import CERTIFICATES, DATA_VARIABLE, GATE, ROOT, STATE_VARIABLE
from crossward.privacy.secagg.identity import Identity
from crossward.site.policy import Policy
from crossward.site.release import Credentials
from crossward.site.troubles import Code, Refusal


def is_simulated(fl_ctx: FLContext) -> bool:
    """Whether this is FLARE's simulator, which gives its clients neither a scope nor a site's filters."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))


def site_policy(fl_ctx: FLContext) -> Policy:
    """The policy of the site whose process this is.

    Raises:
        Refusal: there is no scope, or one without the gate: then nothing may be done here.
    """
    if is_simulated(fl_ctx):
        return _simulated(fl_ctx.get_identity_name())
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    if scope is None or not any(_is_gate(each) for each in scope.task_result_filters[FilterKey.OUT]):
        raise Refusal(Code.POLICY)
    return _from_kit(fl_ctx, scope.props)


def server_policy(fl_ctx: FLContext) -> Policy:
    """The server's place; the scope of its kit has no data and no gate."""
    return _from_kit(fl_ctx, fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES) or {})


def site_credentials(fl_ctx: FLContext) -> Credentials:
    """The certificate and key with which the site signs the keys of a job, and its own copy of the root.

    Raises:
        OSError: the kit has none.
    """
    startup = _startup(fl_ctx)
    name = fl_ctx.get_identity_name() if is_simulated(fl_ctx) else "client"
    identity = Identity((startup / f"{name}.crt").read_bytes(), (startup / f"{name}.key").read_bytes())
    return Credentials(identity, (startup / ROOT).read_bytes(), _servers(startup / "fed_client.json"))


def _servers(settings: Path) -> frozenset[str]:
    """The server's names: it has a certificate of the federation, too, and must not pass for a site."""
    if not settings.exists():
        return frozenset()
    return frozenset(str(server["identity"]) for server in json.loads(settings.read_bytes())["servers"])


def server_roots(fl_ctx: FLContext) -> bytes:
    """The federation's root certificate, as the server's kit has it."""
    kit, made = _startup(fl_ctx) / ROOT, _thrown_away() / ROOT
    # The simulator does not tell its server that it is one; no real server runs without the file in its kit.
    return (kit if kit.exists() else made).read_bytes()


def _startup(fl_ctx: FLContext) -> Path:
    if is_simulated(fl_ctx):
        return _thrown_away()
    return Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_startup_kit_dir())


def _thrown_away() -> Path:
    return Path(os.environ.get(STATE_VARIABLE, "")) / CERTIFICATES


def run_folder(fl_ctx: FLContext) -> Path:
    """FLARE's own folder of this job at this participant."""
    return Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_run_dir(fl_ctx.get_job_id()))


def job_configuration(fl_ctx: FLContext) -> Path:
    """The client half of the job's configuration, as it was signed and deployed."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return Path(workspace.get_client_app_config_file_path(fl_ctx.get_job_id()))


def _from_kit(fl_ctx: FLContext, properties: dict[str, Any]) -> Policy:
    return Policy.from_properties(
        properties,
        kit=Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()).absolute(),
        data=os.environ.get(DATA_VARIABLE),
        state=os.environ.get(STATE_VARIABLE),
    )


def _simulated(name: str) -> Policy:
    data, state = os.environ.get(DATA_VARIABLE), os.environ.get(STATE_VARIABLE)
    if not state:
        raise Refusal(Code.POLICY)
    # Whoever simulates sites has all their images: there is nobody to keep scores from, or to limit delta for.
    return Policy(
        data_root=Path(data) if data else None,
        state_root=Path(state) / "sites" / name,
        minimum_cell=1,
        secure_aggregation=False,
        max_delta=1.0,
    )


def _is_gate(site_filter: object) -> bool:
    kind = type(site_filter)
    return f"{kind.__module__}.{kind.__qualname__}" == GATE
