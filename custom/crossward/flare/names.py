"""Names that jobs, kits and code agree on."""

from __future__ import annotations

from typing import Final

CONTROLLER: Final = "crossward.flare.controller.FederationController"
EXECUTOR: Final = "crossward.flare.executor.SiteExecutor"
GATE: Final = "crossward.flare.gate.SiteGate"

SERVER_CLASSES: Final = (CONTROLLER,)
SITE_CLASSES: Final = (EXECUTOR, GATE)
"""The exact allow-lists: a job that names any other class is refused."""

ASKED: Final = "crossward.asked"
"""Under which the executor puts the server's message into FLARE's context, for the gate to hold the answer against."""

SCOPE: Final = "crossward"
"""The privacy scope that our kits define, with the gate in it; it is the default one."""

STATE_VARIABLE: Final = "CROSSWARD_STATE"
DATA_VARIABLE: Final = "CROSSWARD_DATA"
"""What a site's administrator may set in the environment instead of the scope's properties."""

CERTIFICATES: Final = "certificates"
"""Folder of throw-away certificates for FLARE's simulator."""

ROOT: Final = "rootCA.pem"
"""The federation's root certificate in a kit's startup folder."""

RUN_FILES: Final = "crossward"
"""Folder in FLARE's run folder at the server: result.json, outcome.json; downloaded with the job."""

OUTCOME: Final = "outcome.json"
RESULT: Final = "result.json"
STATISTICS: Final = "crossward"
"""The group under which a running job answers FLARE's question for statistics."""
