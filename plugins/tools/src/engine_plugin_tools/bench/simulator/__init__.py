"""Simulation of a run on many workers: the project's own controller over simulated workers that take only virtual
time.
"""
