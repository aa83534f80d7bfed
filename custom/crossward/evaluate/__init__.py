"""What a run was worth: metrics, the facts kept in `result.json`, the console table and the report."""
