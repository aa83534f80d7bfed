"""The same federation on NVIDIA FLARE: the only room, beside the command, that knows FLARE."""
