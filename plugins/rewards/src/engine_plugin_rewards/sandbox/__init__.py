"""A box for programs that a model wrote: what it holds is decided here, what it promises in ``tiers``.

========== =========================================================================
`box`      starting a box, running programs in it one after another, closing it
`tiers`    which kinds of box hold on this machine, found by attacking each
`probes`   the attacks
`inside/`  what runs in the box; only the standard library, loaded by path
========== =========================================================================

Looked at before writing it: ``landlock`` (a development version for years), ``pyseccomp`` (needs a
library of the system, last released in 2021) and ``sandlock`` (Linux 6.7 and later, starts a program
rather than forking one, 13 MB) on the package index; nsjail and firejail must be built or installed as
root. bubblewrap is used where it is installed. None of them starts a program in a millisecond or two.
"""
