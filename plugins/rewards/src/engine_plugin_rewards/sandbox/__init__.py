"""A sandbox ("box") for programs that a model wrote; ``tiers`` lists what each kind of box promises.

========== =========================================================================
`box`      starting a box, running programs in it one after another, closing it
`session`  a program that keeps its state between pieces of code
`tiers`    which kinds of box hold on this machine, found by attacking each
`probes`   the attacks
`inside/`  the code that runs in the box; only the standard library, loaded by path
========== =========================================================================

Alternatives that were considered: ``landlock`` (a development version for years), ``pyseccomp`` (needs a system
library, last released in 2021) and ``sandlock`` (Linux 6.7 and later, starts a program rather than forking one, 13 MB)
on the package index; bubblewrap, nsjail and firejail must be installed on the machine. None of them starts a program in
a millisecond or two.
"""
