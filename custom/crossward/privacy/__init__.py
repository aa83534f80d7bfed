"""Protection of what leaves a site: secure aggregation."""
