"""Public names of before 2026-11-27: where each one is now. Until version 0.3."""

import dis
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["INTERNAL", "REPLACED", "no_name"]

# (room, the module that defines them, names): what rooms need of each other, and may change without notice. A name that
# became public in another room has that room.
INTERNAL = (
    ("checkpoint", "checkpoint.background.handle", "Handle"),
    ("checkpoint", "checkpoint.files.claims", "Claim ClaimedError"),
    ("checkpoint", "checkpoint.files.stores", "open_store"),
    ("checkpoint", "checkpoint.manage.report", "Report"),
    ("checkpoint", "checkpoint.manage.tracker", "read_latest"),
    ("checkpoint", "checkpoint.reading.descriptions", "Description"),
    ("checkpoint", "checkpoint.reading.explanation", "Read"),
    ("checkpoint", "checkpoint.reading.mapping", "per_rank Rule"),
    ("checkpoint.local", "checkpoint", "LocalReplicas"),
    ("checkpoint.tools", "checkpoint.tools.differences", "diff"),
    ("checkpoint.tools", "checkpoint.tools.gc", "collect"),
    ("checkpoint.tools", "checkpoint.tools.ls", "listing"),
    ("checkpoint.tools", "checkpoint.tools.resharding", "plan_of target_layouts"),
    ("checkpoint.tools", "checkpoint.tools.source", "open_source stream"),
    ("collectives", "collectives.axes", "Axis"),
    ("collectives", "collectives.interrupt", "held_interrupt"),
    (
        "collectives",
        "collectives.kinds",
        "Collective collective_of Own Partial Permuted RankIndex REPLICATED Replicated require_mesh_of_graph Sharded",
    ),
    ("collectives", "collectives.meet", "absent"),
    (
        "collectives",
        "collectives.ops",
        "all_gather_many all_to_all_many all_to_all_rows declare psum_many reduce_scatter_many",
    ),
    ("collectives", "collectives.places", "FLAT Place"),
    ("collectives", "collectives.product_forms", "in_product_form"),
    ("collectives", "collectives.random_words", "positions"),
    ("collectives", "collectives.real", "Group"),
    ("collectives", "collectives.reshard_plan", "Move reshard_moves"),
    ("collectives", "collectives.resharding", "reshard_many whole_parts"),
    ("collectives", "collectives.slurm", "adopt_slurm ranks_of_slurm"),
    (
        "collectives",
        "collectives.table",
        "ALL_TO_ALL_ROWS AXIS_INDEX COLLECTIVES CUT DECLARE PPERMUTE PSUM REDUCE_SCATTER",
    ),
    ("collectives", "collectives.torch_private", "flight_record"),
    ("collectives", "collectives.wires", "largest_of Wire"),
    ("collectives", "collectives.world", "FailedOnRank"),
    ("data", "data.chat", "chat_row"),
    ("data", "data.documents", "Tokens"),
    ("data", "data.indexed_writer", "IndexedWriter merge_indexed token_dtype"),
    ("data", "data.packing", "Packing"),
    ("data", "data.reader", "ahead Reader"),
    ("data", "data.steps", "Batch RankBatches StepBatches"),
    ("data", "data.subword", "SubwordTokenizer"),
    ("data", "data.template", "ChatTemplate"),
    ("data", "data.tokens", "TokenArray write_tokens"),
    ("files", "files.whole", "whole_file"),
    ("interop", "interop.dcp_bridge", "FmegatronReader FmegatronWriter"),
    ("interop", "interop.dcp_read", "dcp_objects read_dcp_object"),
    ("interop", "interop.dtensor", "layout_of mesh_of"),
    ("interop", "interop.state_dict", "from_state_dict to_state_dict"),
    ("layout", "layout.boxes", "row_major_strides"),
    ("layout", "layout.data_parallel", "DATA_AXES Placed SEQUENCE_AXES"),
    ("layout", "layout.dtypes", "dtype_from_name dtype_name"),
    ("layout", "layout.folding", "Folded folded"),
    ("layout", "layout.mesh", "STANDARD_AXES"),
    ("layout", "layout.plan", "Plan Transfer"),
    ("layout", "layout.split", "chunk"),
    ("loop", "loop.config", "UsageError"),
    ("loop", "loop.events", "Events read_events"),
    ("loop", "loop.experiment", "load_experiment"),
    ("loop", "loop.faults.hang", "watched"),
    ("loop", "loop.faults.inject", "Injection"),
    ("loop", "loop.faults.pulse", "Patience Pulse"),
    ("loop", "loop.flags", "parse"),
    ("loop", "loop.hardware", "Peak peak_of"),
    ("loop", "loop.loggers", "progress Table"),
    ("loop", "loop.losses", "BadLossError LossSpike LossStuck"),
    ("loop", "loop.meter", "Meter"),
    ("loop", "loop.metrics", "fetch mean"),
    ("loop", "loop.nonfinite", "NonFiniteError"),
    ("loop", "loop.notebook_ranks", "Engines"),
    ("loop", "step.replicas", "hashes ReplicasDifferError"),
    ("loop", "loop.report.read", "Recorded"),
    ("loop", "loop.rerun", "RerunError"),
    ("loop", "loop.resume", "Begun Changes"),
    ("loop", "loop.services", "MLflow OpenTelemetry"),
    ("loop", "loop.signals", "catch Stop"),
    ("loop", "loop.training", "StepInfo"),
    ("loop", "loop.windows", "Window"),
    ("loop.faults", "loop.faults.hang", "HANG watched"),
    ("loop.faults", "loop.faults.inject", "Injection Injector"),
    ("loop.faults", "loop.faults.notice", "end fail lost_peer Place say watch"),
    ("loop.faults", "loop.faults.pulse", "Patience Pulse"),
    ("loop.report", "loop", "read_run report_page"),
    ("loop.report", "loop.report.read", "Recorded"),
    ("model", "model.adapters", "Adapter"),
    ("model", "model.array_specs", "init rules"),
    ("model", "model.choose", "Choice"),
    ("model", "model.counts", "cache_bytes_per_token flops_per_token parameters"),
    ("model", "model.forward", "block hidden"),
    ("model", "model.json_form", "described description"),
    ("model", "model.mla", "MLA"),
    ("model", "model.norm", "LayerNorm"),
    ("model", "model.rope", "Rope"),
    ("model", "model.sample", "Inference"),
    ("model", "model.scoring", "Score"),
    ("model", "model.stored", "Opened"),
    ("model", "model.text", "pieces"),
    ("model", "model.weights", "gather_weights GROUPS"),
    ("model.families", "model", "llama"),
    ("model.families", "model.families.bamba", "BAMBA"),
    ("model.families", "model.families.deepseek", "DEEPSEEK_V2 DEEPSEEK_V3"),
    ("model.families", "model.families.family", "Family Stored"),
    ("model.families", "model.families.gemma", "GEMMA2 GEMMA3"),
    ("model.families", "model.families.gpt2", "GPT2"),
    ("model.families", "model.families.gpt_oss", "GPT_OSS"),
    ("model.families", "model.families.llamas", "LLAMA"),
    ("model.families", "model.families.mistral", "MISTRAL"),
    ("model.families", "model.families.moe", "MIXTRAL QWEN3_MOE"),
    ("model.families", "model.families.qwen", "QWEN2 QWEN3"),
    ("model.families", "model.families.registry", "family_of"),
    ("nn", "nn.attention_blocks", "attention_with_lse"),
    ("nn", "nn.context_parallel", "gathered_attention two_level_attention ulysses_attention zigzag"),
    ("nn", "nn.attention_masks", "soft_cap visible"),
    ("nn", "nn.embedding", "positions"),
    ("nn", "nn.loss", "best"),
    ("nn", "nn.mlp", "ACTIVATIONS"),
    ("nn", "nn.moe", "dropless expert_weights most_rows with_capacity"),
    ("nn", "nn.rope", "Linear Scaling"),
    (
        "nn",
        "nn.routing",
        "balanced_bias expert_load expert_probs jittered noisy router_entropy router_z_loss Routing "
        "sequence_balance_loss",
    ),
    ("nn", "nn.scaled", "with_scales"),
    ("nn", "nn.state_space", "causal_conv from_before gated_rms_norm segments ssd_step"),
    ("nn", "nn.weight", "Weight"),
    ("optim", "optim.average", "average_of"),
    ("optim", "optim.clipping", "GradNorm group_norms"),
    ("optim", "optim.contrib.blockwise", "float16"),
    ("optim", "optim.contrib.factored", "scale_by_factored_rms"),
    ("optim", "optim.contrib.formats", "Bfloat16 Float32 NoMaster Remainder"),
    ("optim", "optim.contrib.rotated_adam", "scale_by_soap"),
    ("optim", "optim.guard", "Spike"),
    ("optim", "optim.momentum", "accumulate_momentum"),
    ("optim", "optim.orthogonalized", "scale_by_muon"),
    ("optim", "optim.schedule", "Schedule"),
    ("optim", "optim.sign_descent", "scale_by_lion"),
    ("optim.contrib", "optim.contrib.blockwise", "float16"),
    ("optim.contrib", "optim.contrib.factored", "scale_by_factored_rms"),
    ("optim.contrib", "optim.contrib.formats", "Bfloat16 Float32 NoMaster Remainder"),
    ("optim.contrib", "optim.contrib.rotated_adam", "scale_by_soap"),
    ("plan", "plan.from_formulas", "Quick quick_of"),
    ("plan", "plan.from_trace", "Exact in_mib"),
    ("plan", "plan.mesh_search", "Found Search"),
    ("plan", "plan.rates", "measured_rates measured_write"),
    ("plan", "plan.setting", "Setting setting_of"),
    ("plan", "plan.wrapper", "Held"),
    ("step", "step.checker.context", "Finding Report Unproven"),
    ("step", "step.clock", "matmul_seconds seconds_of"),
    ("step", "step.costs", "least_traffic least_transfers state_bytes StateBytes Traffic WeightTransfer"),
    ("step", "step.donation", "Donated"),
    ("step", "step.jitted", "Jitted"),
    ("step", "step.layer", "compiled_layer layer_layout layer_of unstack"),
    ("step", "step.partition", "Policy"),
    ("step", "step.reduce", "raw_gradient_layout"),
    ("step", "step.state", "placements"),
    ("step", "step.timelines.events", "Event Timeline"),
    ("step", "step.timelines.planned", "launches PaperWorld Rates"),
    ("step", "step.tracing", "Traced"),
    ("step", "step.traffic", "bytes_sent Transfer"),
    ("step.overlap", "step", "Overlap"),
    ("step.overlap", "step.overlap.schedule", "overlapped"),
    ("testing", "step.opaque", "inline_layers"),
    ("testing", "testing.compare_ranks", "Parity relative_error"),
    ("testing", "testing.first_difference", "Finding"),
    ("testing", "testing.forkserver", "Fork Forkserver"),
    ("testing", "testing.measure", "paired_seconds peak_bytes report seconds"),
    ("testing", "testing.ranks", "RankError RankPool"),
    ("testing", "testing.simulation", "Simulation"),
    ("tree", "tree.arithmetic", "cast count dot squared_norm stored working_dtype"),
    ("tree", "tree.checks", "require_mesh"),
    ("tree", "tree.pictures", "Shown"),
    ("tree", "tree.spec", "Init"),
    (
        "tree",
        "tree.structure",
        "did_you_mean flatten in_words map_with_path structure_difference Tree unflatten",
    ),
)

# (room, name, what stands in its place)
REPLACED = (
    ("checkpoint.tools", "export", "interop.export_safetensors"),
    ("interop", "fuse", "checkpoint.fuse"),
    ("interop", "pad", "checkpoint.pad"),
    ("interop", "split", "checkpoint.split"),
    ("interop", "stack", "checkpoint.stack"),
    ("interop", "transpose", "checkpoint.transpose"),
    ("interop", "unstack", "checkpoint.unstack"),
    ("loop", "nvidia_restart", "loop.Restart, or the option --run.faults.restart.most=3"),
    ("model", "At", "model.arrays.TokenContext, what a mixer is given"),
    ("model", "settled", "model.post_update"),
    ("nn", "balance_loss", "fmegatron.nn.routing.expert_probs, and Mixer.losses"),
    ("nn", "grouped_mm", "nn.grouped_matmul"),
    ("optim", "adafactor", "optim.contrib.adafactor"),
    ("optim", "fused_parts", "optim.muon, which takes parts as layouts state (Layout.beside)"),
    ("optim", "soap", "optim.contrib.soap"),
    ("optim", "compressed", "optim.contrib.compressed"),
    ("optim", "mup_init", "optim.contrib.mup_init"),
    ("optim", "mup_multipliers", "optim.contrib.mup_multipliers"),
    ("optim", "int8", "optim.contrib.int8"),
    ("optim", "float8", "optim.contrib.float8"),
    ("plan", "Described", "step.Description"),
    ("tree", "Constant", "the number itself: init=-2.0"),
    ("tree", "ones", "the number itself: init=1.0"),
    ("tree", "zeros", "the number itself: init=0.0"),
    ("tree", "neither_norm_nor_bias", "Layout.is_matrix: dims behind those that count layers or experts, no names"),
    ("step", "Declared", "tree.place(arrays, layouts): arrays know their layouts; jit(check=False) is the switch"),
)


def _place_of(room: str, name: str) -> str | None:
    for old, which, place in REPLACED:
        if (old, which) == (room, name):
            return f"in its place stands {place}"
    for old, module, names in INTERNAL:
        if old == room and name in names.split():
            return f"it is no public name any more: from fmegatron.{module} import {name}"
    return None


def no_name(package: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a room's front: an AttributeError, which says where a name of before is.

    __getattr__ = no_name(__name__)
    """
    room = package.removeprefix("fmegatron.")

    def missing(name: str) -> NoReturn:
        place = _place_of(room, name)
        told = f"; {place} (docs/changes.md)" if place else ""
        # `from room import name` drops the text of an AttributeError, but not that of an ImportError.
        here = sys._getframe(1)
        if place and here.f_code.co_code[here.f_lasti] == dis.opmap["IMPORT_FROM"]:
            raise ImportError(f"cannot import name {name!r} from {package!r}{told}", name=package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{told}", name=name)

    return missing
