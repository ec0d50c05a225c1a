"""Parameter groups as path rules: rates, decay, which transform, and what is frozen, in one ordered table."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.optim.adam import LearningRate, checked_rate
from fmegatron.optim.clipping import GradNorm
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.rates_in_state import Settable
from fmegatron.optim.recorded import recorded
from fmegatron.optim.scalars import per_dtype
from fmegatron.optim.transform import Transform, masked_by, stateless
from fmegatron.tree import labels, structure


@dataclass(frozen=True)
class Group:
    """How the leaves of one rule are trained; what is left out is as for all others.

    lr: factor on the learning rate.  rate: a learning rate of their own (number or schedule) instead of the common one;
    `lr` multiplies it too.  weight_decay: their own.  optimizer: name of the transform that makes their direction.
    frozen: they never change; no gradient, no state and no master copy exists for them.
    """

    lr: float = 1.0
    rate: LearningRate | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"Group: lr: got {self.lr}, wanted a finite factor of 0 or more")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise ValueError(f"Group: weight_decay: got {self.weight_decay}, wanted 0 or more")
        if isinstance(self.rate, Settable):
            raise ValueError(
                "Group: rate: got a settable rate, wanted a number or a schedule; give the group its factor lr, of the "
                "common rate of `grouped`, which can be settable"
            )
        if self.rate is not None:
            checked_rate(self.rate)


Rules = Sequence[tuple[str, Group]]


@recorded
def grouped(
    learning_rate: LearningRate,
    rules: Rules,
    *,
    weight_decay: float = 0.1,
    multipliers: Mapping[str, float] | None = None,
    choose: Callable[[str], str] | None = None,
    vectors: str | None = None,
    **transforms: Transform,
) -> Optimizer:
    """An optimizer whose leaves are trained by the first rule that matches their path, and by default without one.

        optim.grouped(
            optim.cosine(3e-4, total=1000),
            [
                ("embed|head", Group(lr=0.3, optimizer="adam")),
                ("vision", Group(frozen=True)),
                (r".*(norm|bias)", Group(weight_decay=0.0, optimizer="adam")),
            ],
            muon=optim.scale_by_muon(),
            adam=optim.scale_by_adam(),
        )

    A leaf moves by -rate·lr·multiplier·(direction + decay·p), decoupled as in AdamW.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        rules: (pattern, Group), first match wins; a pattern is a regular expression over full segments of the path, as
            in layout.Rules.
        weight_decay: of matrices without their own; vectors (norms, biases), and stacks of them, have 0.
        multipliers: path -> factor on the rate (`mup_multipliers`).
        choose: path -> name of the transform where no rule names one; None: the first transform.
        vectors: name of the transform of what is no matrix (`Layout.is_matrix`), where no rule names one; None: as all.
        transforms: named directions; each sees the leaves that are its own, under its name in the state.

    Raises:
        ValueError: values outside of their range; by `init`, a rule that decides no leaf, with the paths it could mean,
            or the rule that hides it.
    """
    if not transforms:
        raise ValueError("grouped: got no transform, wanted at least one direction, such as adam=scale_by_adam()")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: got {weight_decay}, wanted 0 or more, such as 0.1")
    checked_rate(learning_rate)
    table = [(whole_segments(pattern), group) for pattern, group in rules]
    for pattern, group in rules:
        if group.optimizer is not None and group.optimizer not in transforms:
            raise ValueError(
                f"grouped: got the rule {pattern!r} with optimizer {group.optimizer!r}, wanted one of"
                f" {', '.join(transforms)}{structure.did_you_mean(group.optimizer, list(transforms))}"
            )
    first = next(iter(transforms))

    def group_of(path: str) -> Group:
        return next((group for pattern, group in table if pattern.search(path)), Group())

    def direction_of(path: str, leaf: Any) -> str:
        of_all = vectors if vectors is not None and not labels.is_matrix(leaf) else choose(path) if choose else first
        return group_of(path).optimizer or of_all

    def decay_of(path: str, leaf: torch.Tensor) -> float:
        own = group_of(path).weight_decay
        return own if own is not None else weight_decay if labels.is_matrix(leaf) else 0.0

    def rate_of(path: str) -> tuple[LearningRate, float]:
        group = group_of(path)
        factor = group.lr * (1.0 if multipliers is None else multipliers.get(path, 1.0))
        return learning_rate if group.rate is None else group.rate, factor

    def trains(path: str) -> bool:
        return not group_of(path).frozen

    def add_decay(updates: structure.Tree, params: structure.Tree, count: torch.Tensor) -> structure.Tree:
        def one(path: str, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return u + decay * p if (decay := decay_of(path, p)) else u

        return structure.map_with_path(one, updates, params)

    def only(name: str) -> Callable[[str, Any], bool]:
        return lambda path, leaf: direction_of(path, leaf) == name

    named = {name: masked_by(transform, only(name)) for name, transform in transforms.items()}
    decay = stateless(add_decay)._replace(by_dims=bool(weight_decay))
    inner = optimizer(**named, decay=decay, rate=scale_by_rates(rate_of, learning_rate))

    def init(params: structure.Tree) -> structure.Tree:
        _require_that_rules_decide(rules, tree.paths(params))
        return inner.init(tree.partition(params, trains)[0])

    def update(
        grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        grads, trained = tree.partition(grads, trains)[0], tree.partition(params, trains)[0]
        trained, new_state = inner.update(grads, state, trained, norm)
        return tree.merge(trained, params), new_state

    return Optimizer(init, update, trains)


def scale_by_rates(rate_of: Callable[[str], tuple[LearningRate, float]], common: LearningRate) -> Transform:
    """u -> -rate·factor·u, where rate_of(path) = (rate, factor); each schedule is evaluated once for all leaves.

    common: the one rate that may be `settable`, and then is the state.
    """

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        del params
        rates = {rate for rate, _ in map(rate_of, tree.paths(updates)) if callable(rate) or isinstance(rate, Settable)}

        def evaluated(rate: Any) -> dict:
            value = state["settable"] if isinstance(rate, Settable) else torch.as_tensor(rate(count))
            return per_dtype(updates, lambda dtype: [-value.to(count.device, dtype)])

        values = {rate: evaluated(rate) for rate in rates}

        def one(path: str, u: torch.Tensor) -> torch.Tensor:
            rate, factor = rate_of(path)
            if isinstance(rate, int | float):
                return u * (-rate * factor)
            u = u * values[rate][u.dtype][0]
            return u if factor == 1 else u * factor

        return structure.map_with_path(one, updates), tree.map(torch.clone, state)

    return Transform(common.init if isinstance(common, Settable) else lambda params: {}, update)


def whole_segments(pattern: str) -> re.Pattern:
    """A pattern over full segments of a path, anywhere in it: `mlp/w` finds `blocks/mlp/w`, not `blocks/mlp/w2`."""
    try:
        return re.compile(f"(?:^|/)(?:{pattern})(?:/|$)")
    except re.error as error:
        raise ValueError(f"rule: got the path pattern {pattern!r}, wanted a regular expression: {error}") from None


def _require_that_rules_decide(rules: Rules, paths: list[str]) -> None:
    """ValueError for a rule that no path comes to: it matches none, or rules before it take all that it matches."""
    compiled = [whole_segments(pattern) for pattern, _ in rules]
    for i, (pattern, _) in enumerate(rules):
        matched = [path for path in paths if compiled[i].search(path)]
        if not matched:
            near = structure.did_you_mean(
                pattern, [*paths, *sorted({part for path in paths for part in path.split("/")})]
            )
            raise ValueError(
                f"grouped: got the rule {pattern!r}, which matches no path{near}, wanted a regular expression over full"
                f" segments of one of: {', '.join(paths[:8])}{' …' if len(paths) > 8 else ''}"
            )
        if not any(all(not earlier.search(path) for earlier in compiled[:i]) for path in matched):
            hider = next(j for j in range(i) if compiled[j].search(matched[0]))
            raise ValueError(
                f"grouped: got the rule {pattern!r} for leaves such as {matched[0]}, all of which rules before it take,"
                f" such as {rules[hider][0]!r}, wanted each rule to decide a leaf; put the narrower rule first"
            )
