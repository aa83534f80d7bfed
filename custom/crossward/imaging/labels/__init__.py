"""Which image has which label, and whose it is."""
