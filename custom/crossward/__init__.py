"""Crossward: hospitals train one imaging model together on NVIDIA FLARE without moving a scan."""

__version__ = "0.1.0"
