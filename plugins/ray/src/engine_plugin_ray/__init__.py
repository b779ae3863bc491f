"""Runtime ``ray``: the workers of a run are actors of a Ray cluster."""
