"""The report's section on scans that the model should not be trusted on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.plots import Html


def flagged_scans(result: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    """Flagged scans with thumbnails; nothing where no flags were worked out."""
    del result, pictures
    return Html()
