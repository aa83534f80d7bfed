"""Where a FLARE process keeps our things, and under which policy: asked of the site's kit, never of the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext

from crossward.flare.names import DATA_VARIABLE, GATE, STATE_VARIABLE
from crossward.site.policy import Policy
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
    # Whoever simulates sites has all their images, so there is nobody to keep their scores from.
    return Policy(data_root=Path(data) if data else None, state_root=Path(state) / "sites" / name, minimum_cell=1)


def _is_gate(site_filter: object) -> bool:
    kind = type(site_filter)
    return f"{kind.__module__}.{kind.__qualname__}" == GATE
