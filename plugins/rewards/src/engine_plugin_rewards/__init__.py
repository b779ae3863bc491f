"""Rewards for engine-core-rl. The names and their options: ``plugin``."""
