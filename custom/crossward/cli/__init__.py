"""The command ``crossward``: one file per command group."""
