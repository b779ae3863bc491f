"""Requests to a server over HTTP, whose address a run file gives.

::

    options.py      the keys of a table that names a server
    requests.py     secrets, rate limit, deadlines, retries

urllib3 is imported where it is used: ``options`` is read by ``engine validate``.
"""
