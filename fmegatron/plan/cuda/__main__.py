"""`python -m fmegatron.plan` in a process in which torch believes that the device of --device is there (`apart.py`)."""

import sys

from fmegatron.plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main(there=True))
