"""Importing this makes collections of garbage rare: a process of the tests has a large heap to walk and few cycles.

With Python's own threshold a tenth of the processor time of tests that trace goes into walking what is not garbage.
"""

import gc

THRESHOLD = (50_000, 20, 100)

gc.set_threshold(*THRESHOLD)
