"""Differential privacy: clipped, noised, accounted for, and written down before it is spent."""
