"""Many processes for engine-core-rl. What it offers by name: ``plugin``."""

__version__ = "0.1.0"
