"""One file per method, readable beside its paper; a method registers itself by being imported."""

from crossward.methods.base import Method, Prediction, Task
from crossward.methods.registry import available, create, options_of

__all__ = ["Method", "Prediction", "Task", "available", "create", "options_of"]
