"""Asking a server over HTTP, for what a run file names by its address.

::

    options.py      the keys of a table that names a server
    connections.py  connections to one server, each try with its time
    requests.py     secrets, pace, further tries

urllib3 is imported where it is used: ``options`` is read by ``engine validate``.
"""
