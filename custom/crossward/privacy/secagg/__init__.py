"""Secure aggregation, protocol SA-1: the server learns sums over sites and nothing about one site.

Pure: no transport, no training and no files; secrets come from the operating system only. docs/secure-aggregation.md
has the protocol and its threat model.
"""
