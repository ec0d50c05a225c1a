"""Wrong versions of context parallelism: `nn/context_parallel.py`, and the step around it, with one line changed.

finds: who finds it. "check" states that a sum or a border is wrong, and is not ok (findings, or outputs not proven, for
what was never declared again); "simulate" that values are: directions, masks, numbers, which have the right types.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmegatron.layout import Mesh

CP4, TWO = Mesh(cp=4, cpi=1), Mesh(cp=2, cpi=2)
CP2_TP2, CP2_FSDP2 = Mesh(cp=2, cpi=1, tp=2), Mesh(fsdp=2, cp=2, cpi=1)


@dataclass(frozen=True)
class Mutant:
    """One fault. old, new: the text that stands once in the file, and what stands there instead. step: whether the file
    is the step's. packed, window: the masks under which it shows. kernel: whether blocks are kernels where it shows."""

    name: str
    old: str
    new: str
    finds: str = "both"
    form: str = "ring"
    mesh: Mesh = CP4
    step: bool = False
    packed: bool = True
    window: int | None = None
    kernel: bool = True


def ring(name, old, new, finds="both", **more):
    return Mutant(name, old, new, finds, **more)


def balanced(name, old, new, finds="simulate", **more):
    return Mutant(name, old, new, finds, "balanced", **more)


HOP = "kv = ppermute(kv, self.cp, 1)"
AT_HOP = "at = ppermute(at, self.cp, 1) if self.masked else at"
HOME = "dkv = ppermute(dkv + torch.cat(dkv_now, -1), how.cp, 1)  # after"
OUT = 'return declare(_RingAttention.apply(q, k, v, sinks_H, at, how), cp, ("sharded", 2)).transpose(1, 2)'
GRADS = 'grads = [declare(g.to(x.dtype), how.cp, ("sharded", 2)) for g, x in found]'
OWN = 'kv = declare(torch.cat((k, v), -1), how.cp, "own", 2)'
SEEN = "return Sight(at_q, at_k, self.window) if self.masked else None"
GATHERED = "return attention(q_BSHK, k_BTGK, v_BTGK, sight(causal, keys), softcap=softcap, sinks_H=sinks_H)"
MERGE = "return [merged(found[0], more) if hop else more]"
DQ = "dq = dq + dq_now"
LOCAL_LSE = "return [(merged(found[0], more)[0], found[0][1]) if hop else more]"
CALL = '"ring":\n            return forms.ring_attention(q, k, v, seen, cp)'
SUM = "grads = {name: psum(g, axes[SEQ]) for name, g in grads.items()}"

MUTANTS = (
    # ---- what goes round, and where it ends
    ring("keys stand", HOP, "kv = kv", "simulate"),
    ring("keys go the other way", HOP, "kv = ppermute(kv, self.cp, -1)", "simulate"),
    ring("keys skip a rank", HOP, "kv = ppermute(kv, self.cp, 2)", "simulate"),
    ring("keys are summed", HOP, "kv = psum(kv, self.cp)", "simulate"),
    ring("positions stand", AT_HOP, "at = at", "simulate"),
    ring("positions go the other way", AT_HOP, "at = ppermute(at, self.cp, -1)", "simulate"),
    ring("a hop too few", "for hop in range(self.cp.size):", "for hop in range(self.cp.size - 1):", "simulate"),
    ring("a block twice", "for hop in range(self.cp.size):", "for hop in range(self.cp.size + 1):", "simulate"),
    ring("gradients of keys stand", HOME, "dkv = dkv + torch.cat(dkv_now, -1)  # after", "simulate"),
    ring("gradients of keys go the other way", HOME, HOME.replace("how.cp, 1", "how.cp, -1"), "simulate"),
    ring("gradients of keys end a rank before home", HOME,
         HOME.replace("how.cp, 1", "how.cp, int(hop + 1 < how.cp.size)"), "simulate"),
    ring("gradients of keys are sent before they are added", HOME,
         "dkv = (ppermute(dkv, how.cp, 1) if hop else 0.0) + torch.cat(dkv_now, -1)  # after", "simulate"),
    ring("gradients of keys are summed over the ranks", HOME,
         "dkv = psum(dkv + torch.cat(dkv_now, -1), how.cp)  # after"),
    ring("gradients of keys of the last block only", HOME, "dkv = ppermute(torch.cat(dkv_now, -1), how.cp, 1)  # after",
         "simulate"),
    ring("gradients of queries of the last block only", DQ, "dq = dq_now", "simulate"),
    ring("gradients of queries of the first block twice", DQ, "dq = dq + dq_now * (1 + (hop == 0))", "simulate"),
    ring("gradients of queries are summed", DQ, "dq = psum(dq + dq_now, how.cp)"),
    ring("values for keys", OWN, OWN.replace("(k, v)", "(v, k)"), "simulate"),
    # ---- borders
    ring("keys are declared partial", OWN, 'kv = declare(torch.cat((k, v), -1), how.cp, "partial")', "check"),
    ring("keys are declared replicated", OWN, 'kv = declare(torch.cat((k, v), -1), how.cp, "replicated")', "check"),
    ring("output on another dim", OUT, OUT.replace('"sharded", 2', '"sharded", 1'), "check"),
    ring("output on the dim of widths", OUT, OUT.replace('"sharded", 2', '"sharded", 3'), "check"),
    ring("output is a term", OUT, OUT.replace('("sharded", 2)', '"partial"'), "check"),
    ring("output is the same everywhere", OUT, OUT.replace('("sharded", 2)', '"replicated"'), "check"),
    ring("output is not declared", OUT, "return _RingAttention.apply(q, k, v, sinks_H, at, how).transpose(1, 2)",
         "check"),
    ring("output is summed", OUT, OUT.replace("return ", "return psum(").replace(".transpose", ", cp).transpose")),
    ring("output of a term is summed", OUT,
         OUT.replace("return ", "return psum(").replace('("sharded", 2)', '"partial"').replace(".tr", ", cp).tr")),
    ring("gradients on another dim", GRADS, GRADS.replace('"sharded", 2', '"sharded", 1'), "check"),
    ring("gradients are terms", GRADS, GRADS.replace('("sharded", 2)', '"partial"'), "check"),
    ring("gradients are the same everywhere", GRADS, GRADS.replace('("sharded", 2)', '"replicated"'), "check"),
    ring("gradients are not declared", GRADS, "grads = [g.to(x.dtype) for g, x in found]", "check"),
    ring("gradients are summed", GRADS, GRADS.replace("[declare(", "[psum(declare(").replace("2))", "2)), how.cp)")),
    # ---- masks and sums
    ring("queries for keys", SEEN, "return visible(at_k[0], at_q[0], self.window, doc_k, doc_q).mT[:, None], False",
         "simulate"),
    ring("no documents", SEEN, SEEN.replace("at_q, at_k", "at_q[:1], at_k[:1]"), "simulate"),
    ring("no window", SEEN, SEEN.replace("self.window", "None"), "simulate", window=9),
    ring("not causal", SEEN, SEEN.replace("at_q,",
         "at_q + 99 * (torch.arange(len(at_q)) < 1)[:, None, None],"), "simulate"),
    ring("masks of one's own positions", "more = block(q, k, v, how.seen(at, at_k),",
         "more = block(q, k, v, how.seen(at, at),"),
    ring("masks of one's own positions, backward", "(o, lse), how.seen(at, at_k),", "(o, lse), how.seen(at, at),"),
    ring("no mask backward", "(o, lse), how.seen(at, at_k),", "(o, lse),", "simulate"),
    ring("blocks replace each other", MERGE, "return [more]", "simulate"),
    ring("blocks are added", MERGE, "return [(found[0][0] + more[0], found[0][1]) if hop else more]", "simulate"),
    ring("log-sum-exp of the first block", MERGE, LOCAL_LSE, "simulate"),
    ring("the own block twice", MERGE, "return [merged(found[0], more) if hop else merged(more, more)]", "simulate"),
    # ---- the balanced ring
    balanced("late for early", "like=like) >= hop", "like=like) < hop"),
    balanced("early by one more", "like=like) >= hop", "like=like) > hop"),
    balanced("no first keys for second queries", "merged(merged(found[1], low), (o,", "merged(found[1], (o,"),
    balanced("first keys for first queries", "low = attention(q1, a1, k0, v0, b0)",
             "low = attention(q0, a0, k0, v0, b0)"),
    balanced("first queries see what is not theirs", "(o, torch.where(earlier, lse, -math.inf))", "(o, lse)"),
    balanced("second queries see what is not theirs", "(o, torch.where(earlier, -math.inf, lse))", "(o, lse)"),
    balanced("queries exchanged", "torch.where(earlier, lse, -math.inf)", "torch.where(earlier, -math.inf, lse)"),
    balanced("the own block sees all", "block(rows[0], keys[0], keys[1], None, True,",
             "block(rows[0], keys[0], keys[1], None, False,", packed=False),
    balanced("the own block sees all, tiled", "block(rows[0], keys[0], keys[1], None, True,",
             "block(rows[0], keys[0], keys[1], None, False,", packed=False, kernel=False),
    balanced("the own block sees all, backward", "block_backward(do, q, k, v, (o, lse), None, True,",
             "block_backward(do, q, k, v, (o, lse), None, False,", packed=False),
    balanced("the own block sees all, backward, tiled", "block_backward(do, q, k, v, (o, lse), None, True,",
             "block_backward(do, q, k, v, (o, lse), None, False,", packed=False, kernel=False),
    balanced("the second block as the own one", "if hop == 0 and not how.masked:\n        return",
             "if hop < 2 and not how.masked:\n        return", packed=False),
    balanced("the other operands", "q, a, k, v, b = (torch.where(earlier, x, y) for",
             "q, a, k, v, b = (torch.where(earlier, y, x) for"),
    balanced("the other operands, backward", "q, a, do, o, lse, k, v, b = (torch.where(earlier, x, y) for",
             "q, a, do, o, lse, k, v, b = (torch.where(earlier, y, x) for"),
    balanced("gradients to the other half", "return torch.where(earlier, x, 0.0), torch.where(earlier, 0.0, x)",
             "return torch.where(earlier, 0.0, x), torch.where(earlier, x, 0.0)"),
    balanced("half of the gradient of keys", "(dk0 + y0, dk1)", "(dk0, dk1)"),
    balanced("half of the gradient of values", "(dv0 + z0, dv1)", "(dv0, dv1)"),
    balanced("half of the gradient of queries", "(x0, dq1 + x1)", "(x0, dq1)"),
    balanced("no gradient of the diagonal", "(dq0, dq1 + more)", "(dq0, dq1)"),
    balanced("its gradient is not declared own", '"own", 2) if how.balanced else do', '"own", 2) if False else do',
             "check"),
    # ---- gathers and exchanges of heads
    Mutant("gathered keys sum nothing back", "all_gather(torch.cat((k_BSGK, v_BSGK), -1), cp, 1)",
           "wrong.gather_cut(torch.cat((k_BSGK, v_BSGK), -1), cp, 1)", form="gathered"),
    Mutant("one's own keys as often as there are ranks", "all_gather(torch.cat((k_BSGK, v_BSGK), -1), cp, 1)",
           "torch.cat((k_BSGK, v_BSGK), -1).repeat(1, cp.size, 1, 1)", form="gathered"),
    Mutant("one's own positions as often", "positions_T = all_gather(causal.positions, cp, -1)",
           "positions_T = causal.positions.repeat(1, cp.size)", form="gathered"),
    Mutant("one's own documents as often", "else all_gather(documents, cp, -1)", "else documents.repeat(1, cp.size)",
           form="gathered"),
    Mutant("output of all keys is summed", GATHERED, GATHERED.replace("return ", "return psum(") + ", cp)",
           form="gathered"),
    Mutant("places do not come back", "return all_to_all(o_BTHK, cp, 1, 2)",
           "return o_BTHK.chunk(cp.size, 1)[0].repeat(1, 1, cp.size, 1)", form="ulysses"),
    Mutant("places come back and send nothing home", "return all_to_all(o_BTHK, cp, 1, 2)",
           "return wrong.exchange_local(o_BTHK, cp, 1, 2)", form="ulysses"),
    Mutant("heads come back over the wrong dims", "return all_to_all(o_BTHK, cp, 1, 2)",
           "return all_to_all(o_BTHK, cp, 1, 1).chunk(cp.size, 1)[0].repeat(1, 1, cp.size, 1)", form="ulysses"),
    Mutant("heads see one's own positions", "all_gather(causal.positions, cp, -1), _g",
           "causal.positions.repeat(1, cp.size), _g", form="ulysses"),
    # ---- the step around it
    Mutant("weights are not summed", SUM, "grads = dict(grads)", step=True),
    Mutant("weights are summed over one of two axes", SUM, SUM.replace("axes[SEQ]", 'axes["cp"]'), form="two levels",
           mesh=TWO, step=True),
    Mutant("weights are summed twice", SUM, SUM.replace("psum(g, axes[SEQ])", "psum(psum(g, axes[SEQ]), axes[SEQ])"),
           step=True),
    Mutant("weights are summed over fsdp again", SUM, SUM.replace("axes[SEQ]", 'axes["fsdp", *SEQ]'), mesh=CP2_FSDP2,
           step=True),
    Mutant("the loss is that of a rank", '.detach(), axes["fsdp", *SEQ])}', '.detach(), axes["fsdp"])}', step=True),
    Mutant("heads are not summed", 'y_BSD = psum(o_BSHK.flatten(2) @ w["o"], tp)', 'y_BSD = o_BSHK.flatten(2) @ w["o"]',
           mesh=CP2_TP2, step=True),
    Mutant("heads are summed over cp", 'y_BSD = psum(o_BSHK.flatten(2) @ w["o"], tp)',
           'y_BSD = psum(o_BSHK.flatten(2) @ w["o"], axes["cp"])', mesh=CP2_TP2, step=True),
    Mutant("a ring over the rows", CALL, CALL.replace("cp)", 'axes["fsdp"])'), mesh=CP2_FSDP2, step=True),
    Mutant("a ring over the heads", CALL, CALL.replace("cp)", 'axes["tp"])'), mesh=CP2_TP2, step=True),
    Mutant("a ring over the inner axis alone", CALL, CALL.replace("cp)", 'axes["cpi"])'), mesh=TWO, step=True),
    Mutant("a ring over the axes in the other order", CALL, CALL.replace("cp)", 'axes["cpi", "cp"])'),
           "check", mesh=TWO, step=True),
)  # fmt: skip
