"""The first hour on one GPU: nine calls that only measure, each with what a failure of it would mean.

    bash experiments/benchmarks/first_hour.sh 1 2 3 ...        each a process of its own of at most 8 minutes
    DEVICE=cpu bash experiments/benchmarks/first_hour.sh 1     the same on a CPU, small, to see that it runs

    1 numbers   the device against the CPU in fp64 by every backend; no wait of the host; peak; the same bits twice
    2 1b        1 billion parameters: MFU, peak against plan, peers (gpu.py)        3 largest   the deepest that fits
    4 profile   share of products, attention by name, gaps
    5 saves     saves while stepping, bit for bit; a killed writer
    6 ranks     two processes on one GPU; NCCL of one rank through all collectives and dtypes
    7 attention mask x grouped heads x head size: kernel and peak
    8 failures  an id out of range, out of memory
    9 curve     124 M parameters, 300 steps, against plain torch from the same start

A line on stdout for each thing found: "ok", "WRONG" with what it means, or "-" for what is only measured. It needs no
registry and installs nothing. Exit status: 1 where something is WRONG.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peers.decoder import Peer, training_step

from fmegatron import checkpoint, data, model, nn, optim, plan, step, tree
from fmegatron.collectives import Axes, World
from fmegatron.layout import Mesh
from fmegatron.testing.measure import peak_bytes

HERE = Path(__file__).resolve().parent
TEXT = HERE.parents[1] / "data" / "tinyshakespeare.txt"
TINY = {"vocab_size": 256, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "max_seq": 64}
M124 = {"vocab_size": 256, "dim": 768, "layers": 17, "heads": 12, "kv_heads": 12, "ffn_dim": 2048, "max_seq": 512}
PLANNED_1B = 28764.2  # MiB: python -m fmegatron.plan experiments/benchmarks/dense.py --mesh fsdp=1 --device h100
DTYPES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
).split()


@dataclasses.dataclass
class Found:
    """What an item has found. on_gpu: whether it runs there; wrong: how many lines are."""

    device: torch.device
    folder: Path
    wrong: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def line(self, right: bool | None, what: str, meaning: str = "") -> None:
        """right: None for what is only measured. meaning: what is said where it is not right."""
        self.wrong += right is False
        mark = "-    " if right is None else "ok   " if right else "WRONG"
        print(f"{mark} {what}{f'; it means: {meaning}' if right is False else ''}", flush=True)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


# ---- steps -----------------------------------------------------------------------------------------------------------
def described(sizes: dict, dtype: torch.dtype, rows: int = 4):
    decoder = model.llama(**sizes, param_dtype=dtype, compute_dtype=dtype)
    return model.build(decoder, optim.adamw(1e-3), Mesh(), (rows, sizes["max_seq"]))


def trained(of, device: torch.device, backend: str, steps: int, sync: bool = False):
    """(losses, digest of the parameters at the end) of a description's step on a device."""
    world = World.alone(device)
    run = step.jit(of.function, donate=0, backend=backend, world=world)
    state = tree.init(of.state, 0, 0, device)
    generator, losses = torch.Generator().manual_seed(0), []
    shape, most = tree.leaves(of.batch)[0].shape, of.decoder.vocab_size
    for i in range(steps):
        tokens = torch.randint(0, most, (shape[0], shape[1] + 1), generator=generator)
        batch = world.put({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}, of.batch)
        if sync and i == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            state, metrics = run(state, batch)
        finally:
            if sync:
                torch.cuda.set_sync_debug_mode("default")
        losses.append(metrics["loss"])
    return [float(x) for x in losses], digest(state)


def digest(state) -> str:
    """Of the bits of all leaves."""
    found = hashlib.sha256()
    for x in tree.leaves(state):
        found.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# ---- 1 ---------------------------------------------------------------------------------------------------------------
def numbers(found: Found) -> None:
    """The device computes what the CPU does; nothing waits; the peak; the same bits."""
    of = described(TINY, torch.float64)
    wanted, _ = trained(of, torch.device("cpu"), "eager", 5)
    for backend in ("eager", "aot_eager", "inductor"):
        got, _ = trained(of, found.device, backend, 5, sync=found.on_gpu)
        apart = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
        found.line(
            apart < 1e-10,
            f"{backend} in fp64 against the CPU, 5 steps: {apart:.1e} apart, the host waited for nothing",
            "an operator, a layout or a donation is wrong on the device; the first backend that is names the layer",
        )
    of = described(TINY, torch.float32)
    with found_bits() as choose:
        for deterministic in (False, True):
            choose(deterministic)
            first, second = (trained(of, found.device, "inductor", 5)[1] for _ in range(2))
            found.line(
                first == second if deterministic or not found.on_gpu else None,
                f"deterministic={deterministic}: the same bits twice: {first == second}",
                "a kernel with atomics is left in deterministic mode: compare the leaves",
            )
    exact = plan.exact(of).peak
    if found.on_gpu:
        torch.cuda.reset_peak_memory_stats(found.device)
        trained(of, found.device, "inductor", 3)
        peak = torch.cuda.max_memory_allocated(found.device)
    else:
        peak = peak_bytes(lambda: trained(of, found.device, "aot_eager", 1))
    found.line(None, f"peak {peak / 2**20:.2f} MiB, {exact / 2**20:.2f} planned for the CPU's code: {peak / exact:.3f}")


class found_bits:
    """Context: a function that switches torch's deterministic algorithms; they are as they were behind it."""

    def __enter__(self):
        self.before = torch.are_deterministic_algorithms_enabled()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return torch.use_deterministic_algorithms

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(self.before)


# ---- 2, 3 ------------------------------------------------------------------------------------------------------------
def sheet(found: Found, kind: str) -> None:
    """Rows of gpu.py for a model."""
    flags = [f"--only={kind}", "--minutes=7", *([] if found.on_gpu else ["--here", "--backend=aot_eager"])]
    done = subprocess.run([sys.executable, str(HERE / "gpu.py"), *flags], capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="", flush=True)
    lines = {row["metric"]: row for row in map(json.loads, filter(None, done.stdout.splitlines()))}
    found.line(done.returncode == 0, f"gpu.py --only={kind} ended with {done.returncode}", "a row failed: see above")
    if f"gpu_{kind}_mfu" in lines:
        mfu = lines[f"gpu_{kind}_mfu"]["value"]
        found.line(mfu >= 0.55, f"{kind}: MFU {mfu:.3f}, wanted 0.55", "call 4 says where the time goes")
    if kind == "1b" and "gpu_1b_peak_memory" in lines:
        ratio = lines["gpu_1b_peak_memory"]["value"] * 1024 / PLANNED_1B
        meaning = "the plan for the device does not see something: torch.cuda.memory._snapshot() shows what"
        found.line(ratio <= 1.03, f"peak / plan {ratio:.3f}, wanted 1.03 at most", meaning)


# ---- 4 ---------------------------------------------------------------------------------------------------------------
PRODUCTS, ATTENTION = (
    re.compile(r"gemm|nvjet|cutlass|cublas|\bmm\b|addmm|bmm"),
    re.compile(r"flash|fmha|cudnn|attention"),
)


def profile(found: Found) -> None:
    """Where the time of three steps goes."""
    sizes = M124 if found.on_gpu else TINY
    of = described(sizes, torch.bfloat16 if found.on_gpu else torch.float32)
    world = World.alone(found.device)
    run = step.jit(of.function, donate=0, world=world, backend="inductor" if found.on_gpu else "aot_eager")
    state = tree.init(of.state, 0, 0, found.device)
    tokens = torch.zeros(tree.leaves(of.batch)[0].shape, dtype=torch.int64)
    batch = world.put({"tokens": tokens, "labels": tokens}, of.batch)
    for _ in range(3):
        state, _ = run(state, batch)
    found.wait()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if found.on_gpu else [])]) as seen:
        began = time.perf_counter()
        for _ in range(3):
            state, _ = run(state, batch)
        found.wait()
        took = time.perf_counter() - began
    spent = {}
    for event in seen.key_averages():
        us = event.self_device_time_total if found.on_gpu else event.self_cpu_time_total
        if us:
            spent[event.key] = spent.get(event.key, 0.0) + us / 1e6
    total = sum(spent.values())
    products, attention = (sum(s for name, s in spent.items() if of.search(name)) for of in (PRODUCTS, ATTENTION))
    found.line(
        None, f"3 steps {took:.3f} s: products {products / total:.1%}, attention {attention / total:.1%} of work"
    )
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1])[:12]:
        found.line(None, f"  {seconds / total:6.1%}  {name[:100]}")
    if found.on_gpu:
        gaps = 1 - total / took
        found.line(gaps < 0.05, f"gaps {gaps:.1%} of the time", "the host is in the way: launches, or a wait")
        names = [name for name in spent if ATTENTION.search(name)]
        found.line(bool(names), f"attention's kernels: {names}", "attention falls to products with scores in memory")


# ---- 5 ---------------------------------------------------------------------------------------------------------------
def saves(found: Found) -> None:
    """A state that steps while it is saved is saved as it was; a dead writer is an error, and the next save is none."""
    of = described(TINY if not found.on_gpu else {**M124, "layers": 8}, torch.float32)
    world = World.alone(found.device)
    run = step.jit(of.function, donate=0, world=world, backend="inductor" if found.on_gpu else "aot_eager")
    state, layouts = tree.init(of.state, 0, 0, found.device), tree.layouts(of.state)
    tokens = torch.zeros(tree.leaves(of.batch)[0].shape, dtype=torch.int64)
    batch = world.put({"tokens": tokens, "labels": tokens}, of.batch)
    state, _ = run(state, batch)
    nbytes = sum(x.nbytes for x in tree.leaves(state))
    with checkpoint.AsyncSaver() as saver:
        for k in range(3):
            was = digest(state)
            found.wait()
            began = time.perf_counter()
            handle = saver.save(found.folder / f"s{k}", state, layouts)
            stall = time.perf_counter() - began
            for _ in range(5):
                state, _ = run(state, batch)  # in place: the memory that was saved is written
            handle.result()
            back = checkpoint.restore(found.folder / f"s{k}", layouts)
            meaning = "the copy to the host is not ordered before the step that writes the memory again"
            found.line(digest(back) == was, f"save {k} while stepping has the bits of before", meaning)
        host = torch.empty(nbytes, dtype=torch.uint8)
        began = time.perf_counter()
        host.copy_(torch.zeros(nbytes, dtype=torch.uint8))
        copy = time.perf_counter() - began
        found.line(None, f"{nbytes / 2**20:.0f} MiB: stall {stall * 1e3:.1f} ms, memcpy {copy * 1e3:.1f} ms")
        handle = saver.save(found.folder / "killed", state, layouts)
        os.kill(saver.writer_pid, signal.SIGKILL)
        try:
            handle.result()
            found.line(None, "the writer had written before it was killed")
        except RuntimeError as error:
            found.line("killed by SIGKILL" in str(error), f"a killed writer: {error}", "the failure is not named")
        saver.save(found.folder / "after", state, layouts).result()
        same = digest(checkpoint.restore(found.folder / "after", layouts)) == digest(state)
        found.line(same, "the save behind a killed writer", "a new writer does not see the arena of the one before")


# ---- 6 ---------------------------------------------------------------------------------------------------------------
TWO = """
import sys, torch
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Mesh
device, backend = sys.argv[1:]
with connect(Mesh(dp=2), device=device, backend=backend, timeout_s=60) as world:
    x = torch.ones(4, device=world.device) * (world.rank + 1)
    print("sum", psum(x, Axes(world.mesh, world)["dp"]).tolist() == [3.0] * 4, flush=True)
"""


def two_processes(backend: str, device: str, folder: Path) -> str:
    """What two ranks on one device print."""
    script = folder / "two.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, device, backend], capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def ranks(found: Found) -> None:
    """Two ranks on one GPU by gloo, their refusal by NCCL; one rank of NCCL through collectives and dtypes."""
    device = "cuda:0" if found.on_gpu else "cpu"
    said = two_processes("gloo", device, found.folder)
    found.line(said.count("sum True") == 2, "two processes on one device, over gloo", said[-600:])
    if found.on_gpu:
        said = two_processes("cpu:gloo,cuda:nccl", device, found.folder)
        meaning = "set-up does not see it, and NCCL hangs or fails later"
        found.line("wanted one for each, as NCCL refuses two" in said, "two ranks of NCCL on one GPU refused", meaning)
    dist.init_process_group(
        "nccl" if found.on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=found.device if found.on_gpu else None,
    )
    try:
        for name in DTYPES:
            x, refused = torch.ones(8, device=found.device).to(getattr(torch, name)), []
            calls = {
                "all_reduce": lambda x: dist.all_reduce(x.clone()),
                "all_gather": lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x),
                "reduce_scatter": lambda x: dist.reduce_scatter_tensor(torch.empty_like(x), x),
                "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
                "broadcast": lambda x: dist.broadcast(x.clone(), 0),
            }
            for call, run in calls.items():
                try:
                    run(x)
                    found.wait()
                except (RuntimeError, TypeError, ValueError) as error:
                    refused.append(f"{call}: {str(error).splitlines()[0][:60]}")
            as_bytes = name in ("int16", "uint16", "uint32", "uint64") or name.startswith("float8")
            meaning = "collectives/real.py sends it as it is; it has to travel as bytes there"
            right = None if as_bytes or not found.on_gpu else not refused
            found.line(right, f"{name}: {'; '.join(refused) or 'all collectives'}", meaning)
    finally:
        dist.destroy_process_group()


# ---- 7 ---------------------------------------------------------------------------------------------------------------
def attention(found: Found) -> None:
    """Kernel and peak of every form of attention, forward and backward, against fp64."""
    B, S = (2, 2048) if found.on_gpu else (1, 64)
    masks = ("causal", "window", "documents", "softcap", "sinks")
    for mask, groups, width in itertools.product(masks, (1, 4), (64, 128, 256)):
        heads = 4
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(B, S, n, width, generator=generator).to(found.device, torch.bfloat16).requires_grad_()
            for n in (heads, heads // groups, heads // groups)
        )
        at, given = torch.arange(S, device=found.device), {}
        seen = None
        if mask == "window":
            seen = nn.Causal(at, window=S // 4)
        elif mask == "documents":
            documents = (at // (S // 4)).expand(B, S)
            seen = nn.Causal(at, documents)
        given |= {"softcap": 20.0} if mask == "softcap" else {}
        given |= {"sinks_H": torch.zeros(heads, device=found.device)} if mask == "sinks" else {}

        def run(q, k, v, seen=seen, given=given):
            return nn.attention(q, k, v, seen, **given)

        wide = run(*(x.detach().double() for x in (q, k, v)))
        out = run(q, k, v)
        apart = float((out.detach().double() - wide).abs().max())
        if found.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if found.on_gpu else [])]) as profiled:
            run(q, k, v).float().sum().backward()
            found.wait()
        scores = B * heads * S * S
        peak = torch.cuda.max_memory_allocated() - before if found.on_gpu else 0
        names = sorted({e.key[:50] for e in profiled.key_averages() if ATTENTION.search(e.key)})
        what = (
            f"{mask}, {groups} heads a key, width {width}: {apart:.1e} from fp64, peak {peak / 2**20:.0f} MiB, {names}"
        )
        meaning = "wrong numbers, or a buffer of the size of the scores: what nn.attention_kernel says"
        found.line(apart < 0.05 and peak < 2 * scores + 8 * q.nbytes * 4, what, meaning)


# ---- 8 ---------------------------------------------------------------------------------------------------------------
OUT_OF_RANGE = """
import sys, torch, torch.nn.functional as F
x = F.embedding(torch.tensor([99], device=sys.argv[1]), torch.ones(4, 2, device=sys.argv[1]))
print(x.sum().item())
"""


def failures(found: Found) -> None:
    """An id out of range ends the process with words; out of memory is an error that can be caught."""
    command = [sys.executable, "-c", OUT_OF_RANGE, str(found.device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = (done.stderr.strip().splitlines() or [""])[-1]
    found.line(done.returncode != 0, f"an id out of range: {said[:160]}", "it is read from memory of something else")
    if not found.on_gpu:
        return found.line(None, "out of memory: on a GPU alone")
    kept = []
    try:
        while True:
            kept.append(torch.empty(1 << 33, dtype=torch.uint8, device=found.device))
    except torch.cuda.OutOfMemoryError as error:
        found.line("out of memory" in str(error), f"out of memory: {str(error)[:120]}", "another error is raised")
    kept.clear()
    torch.cuda.empty_cache()
    losses, _ = trained(described(TINY, torch.float32), found.device, "inductor", 2)
    found.line(all(map(math.isfinite, losses)), "steps behind it", "memory is not given back")


# ---- 9 ---------------------------------------------------------------------------------------------------------------
def curve(found: Found) -> None:
    """The losses of ours and of plain torch from the same start on the same batches."""
    sizes, steps = (M124, 300) if found.on_gpu else ({**TINY, "layers": 2}, 3)
    dtype = torch.bfloat16 if found.on_gpu else torch.float32
    decoder, device = model.llama(**sizes, compute_dtype=dtype), found.device
    specs = model.specs(decoder, Mesh())
    params = tree.init(specs, 0, 0, device)
    with device:
        module = Peer(decoder)
    module = module.to(device).load(params)
    backend = "inductor" if found.on_gpu else "aot_eager"
    compiled = torch.compile(module, backend=backend)

    def forward(tokens, labels):
        with torch.autocast(device.type, torch.bfloat16, enabled=found.on_gpu):
            return compiled(tokens, labels)

    theirs = training_step(forward, module, 3e-4)
    axes, optimizer = Axes(Mesh()), optim.adamw(3e-4)
    loss = functools.partial(model.loss, decoder=decoder, axes=axes, save="mincut")
    train = step.jit(step.build_train_step(loss, optimizer, tree.layouts(specs), axes), donate=0, backend=backend)
    given = tree.map(torch.clone, params)
    state = tree.init(step.state_specs(specs, optimizer), 0, 0, device, given=given)
    ids = data.ByteTokenizer().encode(TEXT.read_text())
    batches = data.Batches(ids, 8 if found.on_gpu else 2, sizes["max_seq"], seed=0)
    rows = []
    for i in range(steps):
        batch = {name: x.to(device) for name, x in batches.at(i).items()}
        state, metrics = train(state, batch)
        rows.append((float(metrics["loss"]), float(theirs(batch))))
        if i % 25 == 0 or i == steps - 1:
            found.line(None, f"step {i}: {rows[-1][0]:.4f}, plain torch {rows[-1][1]:.4f}")
    last = rows[-20:]
    apart = abs(sum(a - b for a, b in last)) / sum(b for _, b in last)
    meaning = "the numbers of a product, of the optimizer or of the loss's mean differ: call 1 in bf16"
    found.line(apart < 0.02, f"the last {len(last)} losses are {apart:.2%} apart", meaning)


ITEMS = {
    1: numbers,
    2: functools.partial(sheet, kind="1b"),
    3: functools.partial(sheet, kind="largest"),
    4: profile,
    5: saves,
    6: ranks,
    7: attention,
    8: failures,
    9: curve,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", type=int, choices=list(ITEMS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("first_hour: got no CUDA device, wanted one; DEVICE=cpu tries the program on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        found, began = Found(device, Path(folder)), time.perf_counter()
        ITEMS[options.item](found)
        took = time.perf_counter() - began
    print(f"call {options.item}: {found.wrong} WRONG, {took:.0f} s on {device}, torch {torch.__version__}", flush=True)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of a library, such as gloo's behind a call that failed, would be waited for
