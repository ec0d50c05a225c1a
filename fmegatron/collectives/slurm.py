"""Slurm's environment in the words of torchrun, so that `srun python experiment.py` starts ranks without it."""

import re
from collections.abc import Mapping, MutableMapping

# What srun sets for each task of a step. A batch script, and a shell of salloc, have SLURM_NTASKS without these.
NEEDED = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
_FIRST_PORT, _PORTS = 61000, 4000  # above the ports that Linux gives out by itself


def ranks_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task that srun has started.

    Empty where srun has not, or torchrun (WORLD_SIZE is set), or where the step is of one task. What is set already,
    such as MASTER_PORT, is left out. The address is the first node of the step, the port one of 4,000 by job and step.

    >>> of = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    >>> of |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_LOCALID": "1"}
    >>> found = ranks_of_slurm({**of, "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"})
    >>> found["RANK"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]
    ('3', '2', 'gpu07')
    """
    if "WORLD_SIZE" in environment or not all(environment.get(name) for name in NEEDED):
        return {}
    if int(environment["SLURM_STEP_NUM_TASKS"]) < 2:
        return {}
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(counts[node]) if node < len(counts) else "1",
        "MASTER_ADDR": first_node(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + (_number(job) * 31 + _number(step)) % _PORTS),
    }
    return {name: value for name, value in found.items() if name not in environment}


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Add `ranks_of_slurm` to an environment, as torchrun would have: `os.environ`, of this process."""
    environment.update(ranks_of_slurm(environment))


def first_node(nodes: str) -> str:
    """The first name of a list of nodes as Slurm shortens it.

    >>> first_node("gpu[007-009,012],cpu1"), first_node("login"), first_node("r[1-2]n[04,06]")
    ('gpu007', 'login', 'r1n04')
    """
    first, depth = "", 0
    for letter in nodes:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            break
        first += letter
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.strip())
    if not name or re.search(r"[\[\],]", name):
        raise ValueError(f"SLURM_STEP_NODELIST: got {nodes!r:.80}, wanted a list of nodes such as gpu[01-04]")
    return name


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node of a step.

    >>> tasks_per_node("2(x3),1"), tasks_per_node("")
    ([2, 2, 2, 1], [])
    """
    found = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE: got {text!r:.80}, wanted counts such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _number(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)
