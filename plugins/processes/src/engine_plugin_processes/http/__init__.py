"""Requests to a server over HTTP, whose address a run file gives.

::

    options.py      the keys of a table that names a server
    connections.py  connections to one server, each attempt with a deadline
    requests.py     secrets, rate limit, retries

urllib3 is imported where it is used: ``options`` is read by ``engine validate``.
"""
