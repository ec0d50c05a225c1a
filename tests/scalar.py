"""Importing this has Inductor write kernels without vector instructions, for which g++ takes a third of its time.

For processes of the default tests; `make test-all` compiles what users compile.
"""

from torch._inductor import config

config.cpp.simdlen = 1
