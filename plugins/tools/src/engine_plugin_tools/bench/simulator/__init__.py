"""A run on many workers without any: the project's own controller over workers that only take (virtual) time."""
