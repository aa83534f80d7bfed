"""The round: what leaves a site, how sites' tensors are combined, and how a run survives."""
