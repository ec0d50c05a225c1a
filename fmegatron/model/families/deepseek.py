"""DeepSeek V2 and V3: latent attention, experts in groups beside shared ones, dense layers first; MTP.

Sources: arXiv 2405.04434, section 2; arXiv 2412.19437, sections 2.1 and 2.2.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fmegatron import nn
from fmegatron.model.decoder import MTP, Block, Decoder, Part
from fmegatron.model.families.family import Family, linear, plain
from fmegatron.model.families.keys import Keys, yarn_scale
from fmegatron.model.families.llamas import LAYER, UNUSED
from fmegatron.model.families.moe import EXPERT_NAMES
from fmegatron.model.mixer import Mixer
from fmegatron.model.mla import MLA
from fmegatron.model.mlp import MLP
from fmegatron.model.moe import MoE
from fmegatron.model.norm import RMSNorm
from fmegatron.model.rope import Rope


def deepseek(
    vocab_size: int,
    dim: int,
    layers: int,
    max_seq: int,
    attention: Mixer,
    mlp: Mixer,
    moe: Mixer,
    *,
    dense_layers: int = 1,
    norm_eps: float = 1e-6,
    mtp_depths: int = 0,
    mtp_weight: float = 0.1,
    **of_decoder: Any,
) -> Decoder:
    """DeepSeek V2 or V3, of its three mixers.

    Args:
        vocab_size: ids that exist.
        dim: model width.
        layers: number of blocks.
        max_seq: longest sequence, in tokens.
        attention: of all layers (`MLA`).
        mlp: of the first layers.
        moe: of the others (`MoE`).
        dense_layers: how many have no experts.
        norm_eps: of all norms.
        mtp_depths: how many more tokens are predicted in training, each by a block with experts; 0: none.
        mtp_weight: of their mean loss (`MTP`).
        of_decoder: dtypes and the like.
    """
    norm = RMSNorm(norm_eps)
    if mtp_depths:
        further = (Part("attention", attention, norm), Part("mlp", moe, norm))
        of_decoder = {"mtp": MTP(further, mtp_depths, mtp_weight, norm), **of_decoder}

    def block(i: int) -> Block:
        return Part("attention", attention, norm), Part("mlp", mlp if i < dense_layers else moe, norm)

    return Decoder(vocab_size, dim, tuple(map(block, range(layers))), max_seq, norm, **of_decoder)


_ATTENTION = LAYER + "self_attn."
_NAMES = MappingProxyType(
    {
        **EXPERT_NAMES,
        "attention/wq": linear(_ATTENTION + "q_proj.weight"),
        "attention/q_down": linear(_ATTENTION + "q_a_proj.weight"),
        "attention/q_norm": plain(_ATTENTION + "q_a_layernorm.weight"),
        "attention/q_up": linear(_ATTENTION + "q_b_proj.weight"),
        "attention/kv_down": linear(_ATTENTION + "kv_a_proj_with_mqa.weight"),
        "attention/kv_norm": plain(_ATTENTION + "kv_a_layernorm.weight"),
        "attention/kv_up": linear(_ATTENTION + "kv_b_proj.weight"),
        "mlp/choice_bias": plain(LAYER + "mlp.gate.e_score_correction_bias"),
        "mlp/shared/w_gate_up": linear(*(f"{LAYER}mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up"))),
        "mlp/shared/w_down": linear(LAYER + "mlp.shared_experts.down_proj.weight"),
        # of multi-token prediction, whose block has the names of any other
        "embed_norm": plain(LAYER + "enorm.weight"),
        "hidden_norm": plain(LAYER + "hnorm.weight"),
        "proj": linear(LAYER + "eh_proj.weight"),
        "out_norm": plain(LAYER + "shared_head.norm.weight"),
    }
)


def _read(
    keys: Keys, router: nn.Router, choice_bias: bool, interleaved: bool, dense: int, shared: int, **changes: Any
) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("attention_dropout", 0.0, 0)
    keys.only("moe_layer_freq", 1)
    depths = keys.take("num_nextn_predict_layers", keys.take("num_mtp_layers", 0))
    keys.ignore("ep_size", "aux_loss_alpha", "seq_aux", "head_dim")
    keys.ignore("num_key_value_heads", "output_router_logits", "qk_head_dim", "router_aux_loss_coef")
    nope, rotated, (theta, scaling) = keys.take("qk_nope_head_dim"), keys.take("qk_rope_head_dim"), keys.rope()
    given = {**keys.take("rope_scaling", {}), **keys.take("rope_parameters", {})}
    sharper = yarn_scale(given["factor"], given["mscale_all_dim"]) if given.get("mscale_all_dim") else 1.0
    eps, moe_dim = keys.take("rms_norm_eps", 1e-6), keys.take("moe_intermediate_size")
    attention = MLA(
        keys.take("num_attention_heads"),
        keys.take("q_lora_rank", None, absent=1536),
        keys.take("kv_lora_rank"),
        nope,
        keys.take("v_head_dim"),
        Rope(rotated, theta, interleaved, scaling),
        scale=(nope + rotated) ** -0.5 * sharper**2,
    )
    shared = keys.take("n_shared_experts", None, absent=shared)
    of = {
        "vocab_size": keys.take("vocab_size"),
        "dim": keys.take("hidden_size"),
        "layers": keys.take("num_hidden_layers"),
        "max_seq": keys.take("max_position_embeddings"),
        "attention": attention,
        "mlp": MLP(keys.take("intermediate_size")),
        "moe": MoE(router, moe_dim, MLP(shared * moe_dim) if shared else None, choice_bias, fp32_router=True),
        "dense_layers": keys.take("first_k_dense_replace", 0, absent=dense),
        "norm_eps": eps,
        "tied": keys.take("tie_word_embeddings", False),
        "mtp_depths": depths,
    }
    return deepseek(**{**of, **changes})


def _read_v2(keys: Keys, **changes: Any) -> Decoder:
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    experts, top_k, scale = _choice(keys, 1.0)
    groups: dict[str, Any] = {}
    kind = keys.take("topk_method", "greedy")
    if kind == "group_limited_greedy":
        groups = {"groups": keys.take("n_group"), "top_groups": keys.take("topk_group")}
    else:
        keys.only("topk_method", "greedy")
        keys.ignore("n_group", "topk_group")
    return _read(keys, nn.Router(experts, top_k, scale=scale, **groups), False, True, 0, 2, **changes)


def _read_v3(keys: Keys, **changes: Any) -> Decoder:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    experts, top_k, scale = _choice(keys, 2.5)
    groups = {"groups": keys.take("n_group", 8), "top_groups": keys.take("topk_group", 4), "group_best": 2}
    normalised = keys.take("norm_topk_prob", True)
    router = nn.Router(experts, top_k, "sigmoid", normalised=normalised, scale=scale, **groups)
    return _read(keys, router, True, keys.take("rope_interleave", True), 3, 1, **changes)


def _choice(keys: Keys, scale: float) -> tuple[int, int, float]:
    scale = keys.take("routed_scaling_factor", scale)
    return keys.take("n_routed_experts"), keys.take("num_experts_per_tok"), scale


_REPEATED = MappingProxyType(
    {LAYER + "embed_tokens.weight": "embed/table", LAYER + "shared_head.head.weight": "head/w"}
)
DEEPSEEK_V2 = Family("deepseek_v2", _read_v2, _NAMES, UNUSED)
DEEPSEEK_V3 = Family("deepseek_v3", _read_v3, _NAMES, (*UNUSED, r"model\.layers\.{behind}\..*"), _REPEATED)
