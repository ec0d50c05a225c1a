"""Wrong versions of `exchanges.py`: transposes above all."""

from fmegatron.layout import Mesh
from tests.step.mutants.mutate import Mutant as M

HEADS = "q_BSHE = all_to_all(q_BSHE, tp, split_dim=2, concat_dim=1)"
PLACES = "mixed_BSHE = all_to_all(mixed_BSHE, tp, split_dim=1, concat_dim=2)"
OUT = "x_XBD = all_to_all(x_XBD, tp, split_dim=0, concat_dim=1)"
HOME = "y_XBD = all_to_all(y_XBD, tp, split_dim=1, concat_dim=0)"
RING = "part_BTD = ppermute(part_BTD, tp, 1)"
MEANING = 'return declare(out_BSD, tp, forward=("sharded", 1))'
POOLED = "pooled = psum(x_BSD.square().sum() + x_BSD.sum(), tp)"

MUTANTS = (
    M("shard_transpose", "The gradient of a shard stays where it is instead of being gathered.",
      'shard(batch["x_BSD"] * w["scale_D"], tp, 1)', 'wrong.shard_padded(batch["x_BSD"] * w["scale_D"], tp, 1)'),
    M("heads_not_exchanged", "Each rank attends to its own positions only.", HEADS,
      "q_BSHE = torch.cat([q_BSHE[:, :, : H // tp.size]] * tp.size, 1)"),
    M("heads_axis", "Heads are exchanged over fsdp, whose ranks hold other rows.", HEADS, HEADS.replace("tp", "fsdp")),
    M("heads_transpose", "The transpose of the exchange sends nothing.", HEADS,
      "q_BSHE = wrong.exchange_local(q_BSHE, tp, 2, 1)"),
    M("places_axis", "Positions come back over fsdp.", PLACES, PLACES.replace("tp", "fsdp")),
    M("places_gathered", "All ranks keep all positions of their heads, cut to fit.", PLACES,
      "mixed_BSHE = torch.cat([mixed_BSHE[:, : S // tp.size]] * tp.size, 2)"),
    M("wq_not_entered", "The gradient of a shared weight is not summed over positions.", 'enter(w["wq_DHE"], tp)',
      'w["wq_DHE"]'),
    M("wo_entered_twice", "The gradient of a shared weight is summed twice.", 'enter(w["wo_HED"], tp)',
      'enter(enter(w["wo_HED"], tp), tp)'),
    M("wo_entered_mean", "The gradient of a shared weight is averaged over positions.", 'enter(w["wo_HED"], tp)',
      'wrong.enter_mean(w["wo_HED"], tp)', "simulate"),
    M("ring_of_data", "The ring passes on rows of other data.", RING, RING.replace("tp", "fsdp")),
    M("ring_stands", "Each rank sees its own part of the sequence only.", RING, "part_BTD = x_BSD"),
    M("ring_transpose", "Gradients go on round the ring instead of back.", RING,
      "part_BTD = wrong.ring_same(part_BTD, tp, 1)", "simulate", mesh=Mesh(dp=1, fsdp=2, tp=4)),
    M("ring_summed", "Parts of the sequence are added up, not passed on.", RING, "part_BTD = psum(part_BTD, tp)"),
    M("experts_stay", "Positions are not sent to the ranks of their experts.", OUT,
      "x_XBD = torch.cat([x_XBD[: X // tp.size]] * tp.size, 1)"),
    M("experts_axis", "Positions are sent along fsdp.", OUT, OUT.replace("tp", "fsdp")),
    M("experts_transpose", "The transpose of the way out sends nothing home.", OUT,
      "x_XBD = wrong.exchange_local(x_XBD, tp, 0, 1)"),
    M("experts_home_axis", "Results come home over fsdp.", HOME, HOME.replace("tp", "fsdp")),
    M("experts_gather_transpose", "The gradient of a gathered expert is cut.",
      'all_gather(w["down_XFD"], fsdp, 2)', 'wrong.gather_cut(w["down_XFD"], fsdp, 2)'),
    M("experts_gather_axis", "Experts are gathered over dp.", 'all_gather(w["down_XFD"], fsdp, 2)',
      'all_gather(w["down_XFD"], axes["dp"], 2)'),
    M("pooled_local", "The loss is that of this rank's positions.", POOLED,
      POOLED.replace("psum(", "(").replace(", tp)", ")")),
    M("pooled_half", "Only one of two terms is summed over tp.", POOLED,
      "pooled = psum(x_BSD.square().sum(), tp) + x_BSD.sum()"),
    M("pooled_transpose", "The transpose of the loss's sum is a sum.", POOLED,
      POOLED.replace("psum(", "wrong.psum_summed("), "simulate"),
    M("pooled_by_tp", "The loss is divided by tp.", "return pooled / (B * S)", 'return pooled / (B * S) / mesh["tp"]',
      "simulate"),
    M("sgd_inner_again", "Gradients of gathered experts are summed over fsdp again.",
      'psum(raw["down_XFD"], axes["dp"])', 'psum(raw["down_XFD"], data)'),
    M("sgd_one_axis", "Gradients are summed over dp only.", "grads = {k: psum(raw[k], data) for k in whole}",
      'grads = {k: psum(raw[k], axes["dp"]) for k in whole}'),
    M("sgd_unreduced", "A leaf's gradient is used unsummed.",
      "new = {k: p - 0.1 * grads[k] for k, p in params.items()}",
      'new = {k: p - 0.1 * (raw if k == "scale_D" else grads)[k] for k, p in params.items()}'),
)  # fmt: skip
