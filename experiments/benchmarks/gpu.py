"""One GPU's sheet: tokens/s, MFU, peak memory and compile time of ours, nn.Module + torch.compile, and FSDP2.

    make bench-gpu
    python experiments/benchmarks/gpu.py [--minutes=9] [--only=1b,largest] [--here]

Parameters and moments fp32, matrix products bf16, AdamW, clip at 1; each row is a process of its own with a compile
cache of its own ("warm": a second process with the first one's). MFU counts the model's arithmetic (causal attention,
no recomputation) against 989 TFLOP/s, what an H100 or H200 promises for dense bf16; HFU all that the device computes:
`largest`, the deepest Llama of width 4096 that fits, computes its blocks' forward twice. Rows that the time left does
not allow are skipped, with a line that says so.
JSON lines on stdout, a table on stderr. Without CUDA the smallest model runs on the CPU, to see that everything runs;
--here: in this process (for tests). Expected on an H100: MFU 0.6, every peer matched. Exit code 1 if a row failed.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from peers.decoder import Peer, training_step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.counts import flops_per_token, parameters
from fmegatron.testing.measure import peak_bytes, report

PROMISED = 989e12  # FLOP/s, dense bf16 of an H100 SXM or H200 (NVIDIA's data sheets)
SHAPES = {  # sizes of the model, rows of a batch, what a layer of ours saves
    "least": ({"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "max_seq": 16}, 4, "mincut"),
    "1b": ({"dim": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn_dim": 7168, "max_seq": 2048}, 8, "mincut"),
    "largest": ({"dim": 4096, "layers": 0, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "max_seq": 2048}, 4, "inputs"),
}
FORMS = ("ours", "compile", "fsdp2")
# seconds that a row needs at least; one that has fewer left is not begun
LEAST_S = {"probe": 20, "1b": 60, "largest": 100, "least": 30}
GROUPS, STEPS = 3, 5  # of steps between two synchronisations, and how many of these are timed


def config_of(shape: str, layers: int = 0) -> model.Decoder:
    """A decoder of a shape; `layers` where the shape leaves them open."""
    fields = SHAPES[shape][0]
    fields = {**fields, "layers": fields["layers"] or layers, "vocab_size": 64 if shape == "least" else 32768}
    return model.llama(**fields, compute_dtype=torch.bfloat16)


def computed_flops(shape: str, config: model.Decoder) -> int:
    """Multiply-adds times 2 of a token, those that are made again for the backward included."""
    again = flops_per_token(config, training=False) if SHAPES[shape][2] == "inputs" else {}
    return flops_per_token(config)["total"] + again.get("matmul", 0) + again.get("attention", 0)


def layers_that_fit(free: int) -> int:
    """Layers of `largest` for so many bytes: 16 of state and gradient a parameter, a stack of gradients, 8 GiB else."""

    def needed(layers):
        n = parameters(config_of("largest", layers))
        stack = 4 * n["mlp"] * 2 // 3  # gate and up of all layers, once as a list and once as a stack
        return 16 * n["total"] + stack + 8 * 2**30

    return max((layers for layers in range(1, 200) if needed(layers) <= free), default=0)


# ---- in the process of a row -----------------------------------------------------------------------------------------
def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def probe() -> dict:
    """What the machine is, its free memory, and the FLOP/s of its best bf16 matrix product."""
    device = device_of()
    best = 0.0
    for n in (4096, 8192, 16384) if device.type == "cuda" else (256,):
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        for calls in (3, 20):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                a @ b
            synchronize()
            seconds = time.perf_counter() - start
        best = max(best, 2 * n**3 * calls / seconds)
    if device.type == "cpu":
        return {"name": "CPU", "free": 0, "matmul": best}
    return {"name": torch.cuda.get_device_name(), "free": torch.cuda.mem_get_info()[0], "matmul": best}


def batch_of(shape: str, config: model.Decoder, device) -> dict:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (SHAPES[shape][1], config.max_seq + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous().to(device), "labels": tokens[:, 1:].contiguous().to(device)}


def our_step(shape: str, config: model.Decoder, device, backend: str):
    """step(batch) -> loss of ours; parameters are drawn on the device, which takes seconds where `tree.init` takes
    minutes for billions."""
    mesh = Mesh(dp=1)
    specs, axes = model.specs(config, mesh), Axes(mesh)
    layouts, optimizer = tree.layouts(specs), optim.adamw(3e-4)

    def draw(spec):
        x = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        return x.normal_(0, spec.init.std) if isinstance(spec.init, tree.Normal) else x.fill_(spec.init.value)

    holder = [tree.init(step.state_specs(specs, optimizer), 0, rank=0, device=device, given=tree.map(draw, specs))]
    loss = functools.partial(model.loss, decoder=config, axes=axes, save=SHAPES[shape][2])
    train = step.jit(step.build_train_step(loss, optimizer, layouts, axes), donate=0, backend=backend)

    def run(batch):
        holder[0], metrics = train(holder[0], batch)
        return metrics["loss"]

    return run


def module_step(form: str, config: model.Decoder, device, backend: str):
    """step(batch) -> loss of a peer: fp32 parameters and bf16 products, by autocast or by FSDP2's policy."""
    with device:
        module = Peer(config)
    for p in module.parameters():
        torch.nn.init.normal_(p, 0, 0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
    if form == "fsdp2":
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        for block in module.blocks:
            block.compile(backend=backend)
            fully_shard(block, mp_policy=policy)
        fully_shard(module, mp_policy=policy)
        return training_step(module, module, 3e-4)
    compiled = torch.compile(module, backend=backend)

    def forward(tokens, labels):
        with torch.autocast(device.type, torch.bfloat16):
            return compiled(tokens, labels)

    return training_step(forward, module, 3e-4)


def train_row(form: str, shape: str, layers: int, backend: str, timed: bool) -> dict:
    """One form on this device: seconds of the first call, then tokens/s of each group of steps and the peak."""
    device = device_of()
    config = config_of(shape, layers)
    try:
        run = our_step(shape, config, device, backend) if form == "ours" else module_step(form, config, device, backend)
        batch = batch_of(shape, config, device)
        synchronize()
        start = time.perf_counter()
        losses = [float(run(batch))]
        first = time.perf_counter() - start
        if not timed:
            return {"first_call": first}
        for _ in range(2):
            run(batch)
        rates = []
        for _ in range(GROUPS):
            synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                loss = run(batch)
            losses.append(float(loss))
            rates.append(STEPS * batch["tokens"].numel() / (time.perf_counter() - start))
        if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
            raise RuntimeError(f"{form} does not learn one batch by heart: losses {losses}")
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_bytes(lambda: run(batch))
        return {"first_call": first, "rates": rates, "peak": peak, "losses": losses}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the sheet -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Sheet:
    """Runs rows while there is time, each in a process of its own. failed: rows that ended with an error. too_big:
    whether the last row ran out of memory, which is a result and no error."""

    deadline: float
    here: bool
    backend: str
    caches: str
    failed: int = 0
    too_big: bool = False

    def row(self, kind: str, form: str = "", layers: int = 0, timed: bool = True) -> dict | None:
        """The result of a row; None, and a line on stderr, if there is no time, no memory, or an error."""
        name = f"{kind} {form}{'' if timed else ' again'}{f' of {layers} layers' if layers else ''}".strip()
        left, self.too_big = self.deadline - time.monotonic(), False
        arguments = [kind, form, layers, self.backend, timed]
        try:
            if left < LEAST_S[kind]:
                raise TimeoutError(f"skipped, {max(0, left):.0f} s left of the time budget")
            return run_row(*arguments) if self.here else self._child(arguments, left)
        except TimeoutError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            self.too_big = "out of memory" in str(error)
            self.failed += not self.too_big
            print(f"{name}: {'does not fit' if self.too_big else f'failed: {error}'}", file=sys.stderr, flush=True)
        return None

    def _child(self, arguments: list, left: float) -> dict:
        """A row in a process of its own, ended with all that it started when the time is over."""
        cache = os.path.join(self.caches, "_".join(map(str, arguments[:3])))
        places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
        command = [sys.executable, os.path.abspath(__file__), f"--row={json.dumps(arguments)}"]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                command, env={**os.environ, **places}, stdout=out, stderr=errors, start_new_session=True
            )
            try:
                code = child.wait(left)
            except subprocess.TimeoutExpired:
                raise TimeoutError("ended, the time budget is spent") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0), errors.seek(0)
            said = errors.read().strip()
            if code:
                memory = "out of memory" if "OutOfMemoryError" in said else ""
                raise RuntimeError(memory or (said.splitlines() or [f"exit code {code}"])[-1])
            return json.loads(out.read().strip().splitlines()[-1])


def run_row(kind: str, form: str, layers: int, backend: str, timed: bool) -> dict:
    return probe() if kind == "probe" else train_row(form, kind, layers, backend, timed)


def write(sheet: Sheet, kind: str, layers: int, machine: dict, on_gpu: bool) -> None:
    """All rows of one model: ours, ours from a warm cache, the peers."""
    ours = sheet.row(kind, "ours", layers)
    while sheet.too_big and layers > 1:
        layers = layers * 17 // 20
        ours = sheet.row(kind, "ours", layers)
    config = config_of(kind, layers)
    flops, n = flops_per_token(config)["total"], parameters(config)["total"]
    where = f"{machine['name']}, {n / 1e9:.3g} B parameters, batch {SHAPES[kind][1]} x {config.max_seq}, bf16, torch "
    where += torch.__version__

    def line(metric, values, unit, bar=None, **more):
        return report(f"gpu_{kind}_{metric}", values, unit=unit, where=where, bar=bar if on_gpu else None, **more)

    if ours:
        rates = ours["rates"]
        line("tokens_per_second", rates, "1/s", note=f"losses {ours['losses'][0]:.2f} to {ours['losses'][-1]:.2f}")
        line("mfu", [r * flops / PROMISED for r in rates], "ratio", ">= 0.6", against="989 TFLOP/s")
        computed = computed_flops(kind, config)
        line("hfu", [r * computed / PROMISED for r in rates], "ratio", against="989 TFLOP/s")
        line(
            "of_matmul", [r * computed / machine["matmul"] for r in rates], "ratio", against="the best measured matmul"
        )
        line("peak_memory", [ours["peak"] / 2**30], "GiB")
        line("first_call_cold", [ours["first_call"]], "s")
        if again := sheet.row(kind, "ours", layers, timed=False):
            line("first_call_warm", [again["first_call"]], "s")
    for form in FORMS[1:]:
        peer = sheet.row(kind, form, layers)
        if peer:
            line(f"first_call_cold_{form}", [peer["first_call"]], "s")
            line(f"peak_memory_{form}", [peer["peak"] / 2**30], "GiB")
        if peer and ours:
            pairs = zip(rates, peer["rates"], strict=True)
            line(f"speed_over_{form}", [a / b for a, b in pairs], "ratio", ">= 1.0", against=form,
                 note=f"{sum(peer['rates']) / GROUPS:.0f} tokens/s of the peer")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="1b,largest")
    parser.add_argument("--here", action="store_true", help="rows in this process: no caches of their own")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--row", default=None, help="(a child of this program)")
    flags = parser.parse_args(arguments)
    if flags.row:
        print(json.dumps(run_row(*json.loads(flags.row))))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as caches:
        # Half a minute is kept for ending a row that hangs.
        sheet = Sheet(time.monotonic() + 60 * flags.minutes - 30, flags.here, flags.backend, caches)
        on_gpu = torch.cuda.is_available()
        machine = sheet.row("probe")
        if machine is None:
            return 1
        report("gpu_matmul", [machine["matmul"] / 1e12], unit="TFLOP/s", where=f"{machine['name']}, bf16")
        for kind in flags.only.split(",") if on_gpu else ["least"]:
            layers = layers_that_fit(machine["free"]) if kind == "largest" else 0
            write(sheet, kind, layers, machine, on_gpu)
        print("fp8: absent, fmegatron.nn has no fp8 matrix product yet; bar 1.35 x bf16", file=sys.stderr)
    return 1 if sheet.failed else 0


if __name__ == "__main__":
    sys.exit(main())
