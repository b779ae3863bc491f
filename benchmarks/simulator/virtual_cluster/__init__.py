"""Simulation of a run on many workers: the real controller over simulated workers that take only virtual time."""
