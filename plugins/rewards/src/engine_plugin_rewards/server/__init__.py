"""``engine serve-reward``: one reward as a small HTTP server, for the reward ``http`` of other runs.

::

    service.py   a reward of a run file, ready to score columns of samples
    server.py    the server: its two paths, its limits, its stop

Left out on purpose: several rewards at one address, queues that outlive a request, metrics pages, TLS (a proxy
provides it). The standard library's server is sufficient.
"""
