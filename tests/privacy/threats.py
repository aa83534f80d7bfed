"""The threat table of secure aggregation: its rows, of which every one has a test that is named after it."""

from __future__ import annotations

THREATS = {
    "reads single updates": "a curious server",
    "weak prg": "a server that searches for short seeds",
    "key substitution": "a server between two sites",
    "survivors lie": "a server that wants both masks of a site",
    "split view": "a server that tells sites different things",
    "mask reuse": "a server that asks twice, or a site that was restored",
    "model inconsistency": "a server that gives one site another model",
    "disaggregation over rounds": "a server that leaves out one site in the next sum",
    "small cohort": "a server that sums few sites, or sites of its own",
    "zero weights": "a server whose plan leaves one site's part alone",
    "overflow": "a site whose numbers are out of range",
    "poisoning": "a site that makes its update large",
    "corrupt shares": "a site that spoils the opening",
    "replayed or reordered messages": "a server, or the network",
    "side channels": "a server that looks at lengths, fields and counts",
    "aggregate leaks": "whoever sees the sum, or the model",
    "a stolen kit": "an outsider",
    "malicious code in a job": "whoever writes jobs",
}
"""Every threat, and who it comes from."""

NOT_STOPPED = {"quantum computer": "whoever records today"}
"""What nothing stops yet: the documents say so in these words."""
