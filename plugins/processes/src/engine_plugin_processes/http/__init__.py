"""Asking a server over HTTP, for what a run file names by its address.

::

    options.py      the keys of a table that names a server
    addresses.py    which addresses may be connected to
    connections.py  connections to an address that was judged, each try with its time
    asking.py       secrets, pace, further tries

urllib3 is imported where it is used: ``options`` is read by ``engine validate``.
"""
