"""How fast do folders of Hugging Face open and come back? Against scripts with the safetensors package.

    make bench-interop           python experiments/benchmarks/interop.py [--mib=512] [--rounds=7]

A Llama in bf16, two files with an index, in memory-backed storage (/dev/shm). In: one rank of tp=2, 2 threads,
against a script that reads the rank's slices with safetensors, and puts their transposes where they go (fused, layers
stacked): the faster of two ways to write that. Out: from one process against `save_file` of tensors that are ready.
Wall seconds, both sides alternating in one process; the peak is of a process of its own. JSON lines on stdout.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fmegatron import model, tree
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.testing.measure import paired_seconds, report

D, V, HEADS = 2048, 8192, 16


def make_folder(folder: pathlib.Path, mib: int) -> None:
    """About `mib` MiB of a Llama, as transformers writes it."""
    layers, f = max(1, mib // 122), D * 7 // 2
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (D, D) for n in "qkvo"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (f, D) for n in ("gate", "up")} | {f"{at}mlp.down_proj.weight": (D, f)}
        shapes |= {f"{at}{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
    found = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for k, file in enumerate(files):
        save_file({name: found[name] for name in sorted(found)[k::2]}, folder / file, {"format": "pt"})
    table = {name: files[i % 2] for i, name in enumerate(sorted(found))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "num_hidden_layers": layers,
              "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": f, "hidden_act": "silu",
              "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
              "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def script(folder: pathlib.Path, rank: int, size: int, joined: bool) -> dict[str, torch.Tensor]:
    """The same shards by hand. joined: with `cat` and `stack`; else each slice is copied into its place."""
    config = json.loads((folder / "config.json").read_text())
    table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safe_open(folder / file, "pt") for file in set(table.values())}
    n, d, f = config["num_hidden_layers"], D // size, config["intermediate_size"] // size

    def rows(name: str) -> torch.Tensor:
        x = files[table[name]].get_slice(name)
        count = x.get_shape()[0] // size
        return x[rank * count : (rank + 1) * count]

    def columns(name: str) -> torch.Tensor:
        x = files[table[name]].get_slice(name)
        count = x.get_shape()[1] // size
        return x[:, rank * count : (rank + 1) * count]

    def whole(name: str) -> torch.Tensor:
        return files[table[name]].get_tensor(name)

    layer = "model.layers.{}."
    qkv, up = (
        [f"{layer}self_attn.{x}_proj.weight" for x in "qkv"],
        [f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up")],
    )
    norms = {x: torch.stack([whole(f"{layer.format(i)}{x}_layernorm.weight") for i in range(n)])
             for x in ("input", "post_attention")}  # fmt: skip
    out = {**norms, "norm": whole("model.norm.weight"), "table": rows("model.embed_tokens.weight"),
           "head": rows("lm_head.weight").t().contiguous()}  # fmt: skip
    if joined:
        for name, parts in (("wqkv", qkv), ("w_gate_up", up)):
            out[name] = torch.stack([torch.cat([rows(p.format(i)).t() for p in parts], 1) for i in range(n)])
        for name, part in (("wo", "self_attn.o_proj.weight"), ("w_down", "mlp.down_proj.weight")):
            out[name] = torch.stack([columns(layer.format(i) + part).t() for i in range(n)])
        return out
    kinds = {"wqkv": (D, 3 * d), "w_gate_up": (D, 2 * f), "wo": (d, D), "w_down": (f, D)}
    out |= {name: torch.empty(n, *shape, dtype=torch.bfloat16) for name, shape in kinds.items()}
    for i in range(n):
        for name, parts in (("wqkv", qkv), ("w_gate_up", up)):
            for place, part in zip(out[name][i].chunk(len(parts), 1), parts, strict=True):
                place.copy_(rows(part.format(i)).t().contiguous())
        out["wo"][i].copy_(columns(layer.format(i) + "self_attn.o_proj.weight").t())
        out["w_down"][i].copy_(columns(layer.format(i) + "mlp.down_proj.weight").t())
    return out


def opened(folder: pathlib.Path, mesh: Mesh) -> tuple[model.Decoder, dict]:
    """The decoder of the folder and its layouts, in bf16."""
    decoder = hf.decoder(folder, param_dtype=torch.bfloat16)
    return decoder, model.layouts(decoder, mesh)


def held(params: dict) -> int:
    """Bytes of a rank's parameters."""
    return sum(x.nbytes for x in tree.leaves(params))


def status(name: str) -> int:
    """A figure of /proc/self/status, bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def peak(folder: pathlib.Path) -> None:
    """Print what a load takes beside its shards, bytes: run as a process of its own."""
    decoder, layouts = opened(folder, Mesh(tp=2))
    torch.ones(1 << 20).t().contiguous()
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    params = hf.load(folder, decoder, layouts, rank=1)
    print(status("VmHWM") - before - held(params))


def bench_load(folder: pathlib.Path, rounds: int, where: str) -> None:
    """One rank of tp=2."""
    decoder, layouts = opened(folder, Mesh(tp=2))
    ours = lambda: hf.load(folder, decoder, layouts, rank=1)  # noqa: E731
    nbytes = held(ours())
    flat = dict(zip(tree.paths(layouts), tree.leaves(ours()), strict=True))
    theirs = {joined: script(folder, 1, 2, joined) for joined in (True, False)}
    for found in theirs.values():  # both make the same shards
        for name in ("wqkv", "w_gate_up", "wo", "w_down"):
            (mine,) = (x for path, x in flat.items() if path.endswith(f"/{name}"))
            assert torch.equal(mine, found[name]), name
    pairs = {
        joined: paired_seconds(lambda joined=joined: script(folder, 1, 2, joined), ours, rounds) for joined in theirs
    }
    best = min(pairs, key=lambda joined: sorted(a for a, _ in pairs[joined])[rounds // 2])
    rate = nbytes / sorted(b for _, b in pairs[best])[rounds // 2] / 1e9
    report("hf_load_vs_script", [a / b for a, b in pairs[best]], unit="ratio", where=where, bar=">= 1.3",
           against="safetensors slices + transpose", note=f"{rate:.2f} GB/s")  # fmt: skip
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    buffers = [torch.empty(size // 2, dtype=torch.uint8) for size in sizes]

    def plain() -> list[torch.Tensor]:
        fresh = [torch.empty_like(buffer) for buffer in buffers]
        for file, x in zip(folder.glob("*.safetensors"), fresh, strict=True):
            with open(file, "rb", 0) as opened_file:
                opened_file.readinto(x.numpy())
        return fresh

    pairs = paired_seconds(plain, ours, rounds)
    report("hf_load_vs_plain_read", [a / b for a, b in pairs], unit="ratio", where=where, bar=">= 0.3",
           against="plain readinto() of as many bytes")  # fmt: skip
    command = [sys.executable, __file__, f"--peak={folder}"]
    beside = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 2**20 for _ in range(3)]
    report("hf_load_peak_beside_shards", beside, unit="MiB", where=where, bar="<= 64")


def bench_save(folder: pathlib.Path, base: pathlib.Path, rounds: int, where: str) -> None:
    """A folder from one process that holds all."""
    decoder, layouts = opened(folder, Mesh())
    params = hf.load(folder, decoder, layouts)
    ready = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    ready = {name: {k: x.clone() for k, x in found.items()} for name, found in ready.items()}

    def fresh() -> None:
        shutil.rmtree(base / "ours", ignore_errors=True)
        shutil.rmtree(base / "theirs", ignore_errors=True)
        (base / "theirs").mkdir()

    def theirs() -> None:
        for name, found in ready.items():
            save_file(found, base / "theirs" / name, {"format": "pt"})

    ours = lambda: hf.save(base / "ours", params, decoder, layouts, like=folder, shard=300 << 20)  # noqa: E731
    pairs = paired_seconds(theirs, ours, rounds, fresh)
    report("hf_save_vs_save_file", [a / b for a, b in pairs], unit="ratio", where=where, bar=">= 0.6",
           against="safetensors save_file of ready tensors")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Print the lines."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--mib", type=int, default=512)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--peak", type=pathlib.Path)
    options = flags.parse_args(argv)
    if options.peak:
        return peak(options.peak)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="bench-") as name:
        folder = pathlib.Path(name) / "llama"
        folder.mkdir()
        make_folder(folder, options.mib)
        cores = len(os.sched_getaffinity(0))
        where = f"memory-backed, 1 process on {cores} cores ({platform.machine()}), {options.mib} MiB"
        bench_load(folder, options.rounds, f"{where}, torch {torch.__version__}")
        bench_save(folder, pathlib.Path(name), options.rounds, f"{where}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
