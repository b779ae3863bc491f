"""A rollout engine in a process of its own, with the environment of another Python if wanted (``[rollout.process]``).

``engine.SamplerEngine`` stands where the engine would stand, in the process of the worker that owns it; ``process``
holds the child's end of the line, ``child`` and ``serve`` are the child, ``buckets`` brings weights across.
"""
