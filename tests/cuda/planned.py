"""What `plan.exact` says of steps on an H100, one JSON object a line: python -m tests.cuda.planned CASE ...

Run with the guard and triton (`fmegatron.plan.cuda.apart`). CASE: as for `tests.cuda.look`, by number or "dense".
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from fmegatron import plan
from fmegatron.plan.cuda import sheet
from fmegatron.plan.cuda.devices import DEVICES
from tests.cuda.look import case_of


def main(names: list[str]) -> None:
    """Plan each case."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            described, mesh, what = case_of(name, Path(folder))
        found = plan.exact(described, mesh=mesh, device=DEVICES["h100"])
        kinds: dict[str, dict[str, int]] = {}
        for one in found.kernels:
            of = kinds.setdefault(one.kind, {"calls": 0, "bytes": 0, "flops": 0, "sent": 0})
            for key, value in zip(of, (one.calls, one.nbytes, one.flops, one.sent), strict=True):
                of[key] += round(value)
        said = {
            "what": what,
            "bytes": {"state": found.state, "batch": found.batch, "transient": found.transient},
            "groups": dict(found.groups),
            "kinds": kinds,
            "of the state": round(sum(one.state_read for one in found.kernels)),
            "text": sheet.summary(found) + "\n" + sheet.passes(found),
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
