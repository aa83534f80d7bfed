"""Attacks on what leaves a site, and checks of what protects it: run against this code, not argued about."""
