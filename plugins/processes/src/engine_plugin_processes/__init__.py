"""Runtimes, weight transports and samplers in several processes for engine-core-rl; ``plugin`` registers them."""

__version__ = "0.1.0"
