"""A plugin for engine-core-rl; the hooks are in ``plugin.py``."""
