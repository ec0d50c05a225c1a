"""The feed-forward mixer: two matrices, or a gate beside the first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import enter
from fmegatron.layout import Mesh
from fmegatron.model.arrays import Array, TokenContext
from fmegatron.model.mixer import PerToken, Widths
from fmegatron.nn import mlp
from fmegatron.tree import structure


@dataclass(frozen=True)
class MLP(PerToken):
    """(act(u gate) * (u up)) down; without a gate act(u up + b) down + b.  activation: of `nn.ACTIVATIONS`.

    bias: of the form without a gate.
    """

    ffn_dim: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self):
        if not isinstance(self.ffn_dim, int) or isinstance(self.ffn_dim, bool) or self.ffn_dim < 1:
            raise ValueError(f"MLP.ffn_dim: got {self.ffn_dim!r}, wanted a whole number of at least 1")
        if self.activation not in mlp.ACTIVATIONS:
            raise ValueError(f"MLP.activation: got {self.activation!r}, wanted one of {', '.join(mlp.ACTIVATIONS)}")
        if self.gated and self.bias:
            raise ValueError("MLP.bias: got True with a gate, wanted False; set gated=False, or write a mixer")

    def arrays(self, dim: int) -> dict[str, Array]:
        """{"w_gate_up": [D, 2F], "w_down": [F, D]}, or {"w_up", "w_down"} and biases "bias_up", "bias_down"."""
        F = self.ffn_dim
        down = {"w_down": Array((F, dim), (("tp", "fsdp"),), residual=True)}
        if self.gated:
            return {"w_gate_up": Array((dim, 2 * F), ("fsdp", "tp"), (F, F)), **down}
        biases = {"bias_up": Array((F,), ("tp",), init=0.0), "bias_down": Array((dim,), init=0.0)}
        return {"w_up": Array((dim, F), ("fsdp", "tp")), **down, **(biases if self.bias else {})}

    def check_mesh(self, mesh: Mesh) -> None:
        """ValueError where tp does not divide the hidden width."""
        tp = mesh["tp"]
        if self.ffn_dim % tp:
            raise ValueError(
                f"MLP.ffn_dim: got {self.ffn_dim}, wanted a multiple of tp={tp} on the mesh {mesh}; "
                f"try ffn_dim={-(-self.ffn_dim // tp) * tp}"
            )

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """Nothing that plans do not count."""
        return ()

    def widths(self, dim: float, tp: int, number: int) -> Widths | None:
        """The hidden units, and what the norm keeps."""
        F, gate = self.ffn_dim / tp, 2 if self.gated else 1
        mincut = gate * F + 4 / number  # one fp32 number of the norm
        return Widths(mincut, mincut + 2 * dim + gate * F, F + dim, gate * F + dim, F, (gate + 1) * F)

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor:
        """`u[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, S_tp at both ends with sequence parallelism."""
        tp, split = at.axes["tp"], at.splits(u_BSD)
        if self.gated:
            return nn.gated_mlp(u_BSD, w["w_gate_up"], w["w_down"], tp, split, self.activation)
        u_BSF = nn.column_parallel(u_BSD, w["w_up"], tp, split)
        u_BSF = mlp.ACTIVATIONS[self.activation](u_BSF + w["bias_up"].to(u_BSF.dtype) if self.bias else u_BSF)
        y_BSD = nn.row_parallel(u_BSF, w["w_down"], tp, split)
        if not self.bias:
            return y_BSD
        return y_BSD + (enter(w["bias_down"], tp) if split else w["bias_down"]).to(y_BSD.dtype)
