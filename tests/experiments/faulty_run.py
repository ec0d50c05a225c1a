"""A run with faults, then one without: `torchrun ... faulty_run.py EXPERIMENT FLAGS`, of which one is
`--run.faults.inject=...`.

EXPERIMENT: a module with a Config and an `experiment`, or a main. When the run has ended well, whatever number of
attempts it took, it is done once more by the same processes in the folder RUN-clean, without faults.
"""

import dataclasses
import importlib
import sys

from fmegatron import loop
from fmegatron.loop import Faults


def main(config):
    """The run with its faults, and the one that had none."""
    train_it = EXPERIMENT.experiment if "experiment" in vars(EXPERIMENT) else EXPERIMENT.main
    result = train_it(config)
    clean = dataclasses.replace(config.run, folder=f"{config.run.folder}-clean", faults=Faults())
    train_it(dataclasses.replace(config, run=clean))
    return result if isinstance(result, float | None) else result.metrics


if __name__ == "__main__":
    EXPERIMENT = importlib.import_module(sys.argv.pop(1))
    loop.launch(main, EXPERIMENT.Config)
