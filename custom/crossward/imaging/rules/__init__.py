"""A hospital's ``site.yaml``: read, checked, and asked."""
