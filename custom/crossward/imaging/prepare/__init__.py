"""Pictures made once, kept on disk, and read by training."""
