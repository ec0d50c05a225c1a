"""Maximal update parametrization: learning rates and initial values that transfer from a narrow model to a wide one.

Yang et al. 2022, arXiv 2203.03466, table 3: with fan_in growing, hidden weights and the read-out learn (by Adam, or any
optimizer whose steps do not depend on the size of the gradient) at a rate that shrinks as 1/fan_in; the variance of
hidden weights shrinks as 1/fan_in, that of the read-out as 1/fan_in². Embeddings, norms and biases stay as they are.
"""

from typing import Any

from fmegatron import tree
from fmegatron.optim.transform import Where, path_predicate
from fmegatron.tree import ArraySpec, Normal, labels, structure


def mup_multipliers(specs: structure.Tree, base: structure.Tree, matrices: Where | None = None) -> dict[str, float]:
    """{path: base fan_in / fan_in}, for `grouped(..., multipliers=)`: the rates of a wide model, tuned on `base`.

    specs, base: ArraySpecs (or Layouts, or tensors) of the model and of the one whose rate was tuned, of the same
    structure. A matrix [..., in, out] (`matrices`: by default all) has fan_in = its dim -2; so an
    embedding table [vocab, width] keeps its rate. A tied table, which is the read-out too, does as well. ValueError
    where the trees or the numbers of dims differ.
    """
    pairs = _pairs(specs, base, matrices)
    return {path: small.shape[-2] / wide.shape[-2] for path, (wide, small) in pairs.items()}


def mup_init(specs: structure.Tree, base: structure.Tree, matrices: Where | None = None) -> structure.Tree:
    """The specs with the standard deviations of Normal initial values scaled by table 3 from those of `base`.

    Hidden matrices, of which both dims grow: by √(base fan_in / fan_in); read-outs, of which only fan_in grows: by base
    fan_in / fan_in.
    """
    pairs = _pairs(specs, base, matrices)

    def one(path: str, spec: ArraySpec) -> ArraySpec:
        if path not in pairs or not isinstance(spec.init, Normal):
            return spec
        small = pairs[path][1]
        ratio = small.shape[-2] / spec.shape[-2]
        power = 0.5 if small.shape[-1] != spec.shape[-1] else 1.0
        return spec.replace(Normal(spec.init.std * ratio**power))

    return structure.map_with_path(one, specs)


def _pairs(specs: structure.Tree, base: structure.Tree, matrices: Where | None) -> dict[str, tuple[Any, Any]]:
    """path -> (leaf, leaf of the base model) of all matrices."""
    selects = (lambda path: True) if matrices is None else path_predicate(matrices)
    paths, leaves, _ = structure.flatten(specs)
    twins = tree.leaves(tree.map(lambda leaf, twin: twin, specs, base))
    for path, leaf, twin in zip(paths, leaves, twins, strict=True):
        if len(leaf.shape) != len(twin.shape):
            raise ValueError(
                f"mup: {path}: got shape {tuple(leaf.shape)} and in the base model {tuple(twin.shape)}, wanted the"
                " same number of dims; the models may differ in sizes only"
            )
    found = zip(paths, leaves, twins, strict=True)
    return {path: (leaf, twin) for path, leaf, twin in found if selects(path) and labels.is_matrix(leaf)}
