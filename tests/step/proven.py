"""A step that is proven and compared with one rank: traced once for both."""

from fmegatron.step.checker.entrypoints import check_call
from fmegatron.testing import assert_parity
from fmegatron.testing.compare_ranks import Parity


def proven_and_equal(make_step, mesh, *args, **options) -> Parity:
    """`testing.assert_parity` with these arguments; and the check of collectives finds nothing in the graph that ran.

    The arguments are of the dtypes that the layouts say (no fp64=True, which changes the graph).
    """
    found = assert_parity(make_step, mesh, *args, **options)
    report = check_call(found.sharded.traced, mesh, (0,), "step", speak=False)  # raises with all findings
    assert report.ok and not report.unproven, str(report)
    return found
