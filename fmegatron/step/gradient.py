"""Loss and gradient of one call of a loss_fn, whose loss is a scalar of this rank, or sums and counts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout
from fmegatron.step import offload
from fmegatron.step.parts import Part, Shown, before, finished, lines_of, parts_of, require_names, summed, terms
from fmegatron.step.reduce import raw_gradient_layout, widened
from fmegatron.step.torch_private import is_tracing, last_recorded, mark_backward, reaches_before
from fmegatron.step.tracing import described
from fmegatron.tree import labels, structure

__all__ = ["Gradient", "LossFn", "value_and_grad"]


def value_and_grad(
    loss_fn: Callable, dtype: torch.dtype | None = None, *, axes: Axes | None = None, **of_jax: Any
) -> Callable:
    """`loss_fn(params, *args) -> loss` or `(loss, aux)` becomes `f(params, *args) -> ((loss, aux), grads)`.

    params: a tree of tensors; grads: the same tree, each leaf with the shape and dtype of its parameter (zeros for a
    parameter that the loss does not use). aux: a tree, without its gradient history; {} where loss_fn returns
    none. Keyword arguments go to loss_fn.
    The loss of loss_fn is `step.mean(total, count)` or a dict of such parts: then the loss of f is that of the whole
    batch, equal on all ranks, and aux has "loss", each part's mean by its name and its count, "NAME/count". Or it is a
    0-d tensor, this rank's part of a sum over the data axes, which f returns as it is.
    Gradients of parameters that know their layouts know theirs, as `reduce_gradients` takes them: pending sums over the
    data axes that do not split the parameter.
    Inside of what is differentiated itself (MAML, a penalty on gradients) loss, aux and grads have their gradients; the
    value of a loss of means has none, and says so.
    Raises ValueError, naming loss_fn's line, for a result that is none of these, and for a loss without a gradient.
    dtype: floating parameters that are narrower are cast to it before they are differentiated, so that their gradients
    have it: sums that were reduced in fp32 are not rounded to the 16 bits of a parameter. None: as the parameters are.
    axes: over whose data axes parts are added up; None: those of the mesh of the parameters, which know their layouts.
    """
    _require_own_arguments(dtype, of_jax)
    if not callable(loss_fn):
        raise ValueError(f"value_and_grad: got {structure.in_words(loss_fn)}, wanted a function loss_fn(params, *args)")
    of_loss = LossFn(loss_fn, axes, dtype)

    @functools.wraps(loss_fn)
    def with_grad(params, *args, **named):
        with of_loss.differentiated(params, beside=(args, named)) as call:
            call.returned = loss_fn(call.params, *args, **named)
        return of_loss.whole(call.gradient, params)

    return with_grad


class Gradient(NamedTuple):
    """Of one call of a loss_fn: a tree, as a trace returns it.

    before, sums: of a loss of parts, what must be known of the whole batch before the backward, {axes: {name: of these
    rows}} and {name: of the whole batch}. loss: of a scalar, else (). aux: what came behind the loss. shown: of parts.
    """

    before: dict[str, dict[str, torch.Tensor]]
    sums: dict[str, torch.Tensor]
    lines: dict[str, str]
    loss: Any
    aux: Any
    shown: Shown | None
    grads: structure.Tree


class Call:
    """A call of a loss_fn, which whoever opens `LossFn.differentiated` makes: `returned = loss_fn(params, ...)`.

    params: those that are given to it. returned: what it returned; who makes the call sets it. gradient: of it, behind
    the context.
    """

    params: Any
    returned: Any
    gradient: Gradient


class LossFn:
    """A loss_fn with what its gradient needs to know.

    axes: over whose data axes parts are added up; None: those that the parameters know. dtype: as of `value_and_grad`.
    require: hears aux, and may refuse it. n: microbatches of a batch.
    """

    def __init__(self, loss_fn, axes: Axes | None, dtype: torch.dtype | None, require: Callable | None = None, n=1):
        self.loss_fn, self.axes, self.dtype, self.n = loss_fn, axes, dtype, n
        self.require = require or (lambda aux: None)

    def _read(self, returned: Any) -> tuple[Any, dict[str, Part] | None, Any]:
        """(loss, the same as parts, aux) of what loss_fn returned."""
        loss, aux = loss_and_aux(self.loss_fn, returned)
        self.require(aux)
        parts = parts_of(self.loss_fn, loss)
        found = {k: x for k, x in aux.items() if isinstance(x, Part)} if isinstance(aux, dict) else {}
        if parts is None and found:
            raise ValueError(
                f"{described(self.loss_fn)}: metric {min(found)!r}: got a mean(total, count) beside a loss that is a "
                "tensor, wanted the loss as a mean too; return step.mean(total, count) as the loss"
            )
        return loss, parts, aux

    def before(self, params, args: tuple) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
        """`Gradient.before` and `Gradient.lines` by a forward pass alone."""
        # Of two means that are multiplied the one with a gradient is the part: without history none would have one.
        with torch.enable_grad():
            _, parts, _ = self._read(self.loss_fn(self._leaves_of(params, args), *args))
            if parts is None:
                return {}, {}
            axes = self.axes_of(params)
            return before(parts, axes), lines_of(parts.values(), axes)

    def _raw(self, layout: Layout) -> Layout:
        """The layout of a parameter's gradient, where the loss is this rank's part of a sum over the data axes."""
        return raw_gradient_layout(offload.on_device(layout), (self.axes or Axes(layout.mesh)).data)

    def known(self, grads, params):
        """Gradients that were computed of parameters, with the layouts that `gradient` gives them."""

        def one(g: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
            layout = tree.layout_of(param)
            return _knowing(g, layout and self._raw(layout).replace(dtype=g.dtype))

        return tree.map(one, grads, params)

    def axes_of(self, params) -> Axes:
        """The axes over which parts are added up. ValueError where nothing knows them."""
        if self.axes is not None:
            return self.axes
        known = [layout for layout in map(tree.layout_of, tree.leaves(params)) if layout is not None]
        if not known:
            raise ValueError(
                f"{described(self.loss_fn)}: its loss: got sums and counts, and parameters whose layouts are not known,"
                " wanted the mesh over whose ranks they are added up; place them, tree.place(params, layouts),"
                " or give axes=Axes(mesh)"
            )
        return Axes(known[0].mesh)

    def gradient(
        self, params, args: tuple, named: Mapping = MappingProxyType({}), scale=None, sums: dict | None = None
    ) -> Gradient:
        """The gradient of one call, as of `differentiated`."""
        with self.differentiated(params, scale, sums, (args, named)) as call:
            call.returned = self.loss_fn(call.params, *args, **named)
        return call.gradient

    def _leaves_of(self, params, beside: Any, around: bool = False) -> structure.Tree:
        """The parameters as leaves of autograd's graph, in the dtype of their gradients; they know their layouts. Those
        in host memory are brought to the device of what is `beside`, where their gradients will be.
        around: whether what is around is differentiated too; then they keep their history."""
        self._require_leaves(params, *structure.flatten(params)[:2])
        _, leaves, spec = structure.flatten(offload.brought(params, beside))

        def one(leaf: torch.Tensor) -> torch.Tensor:
            wide = leaf if self.dtype is None else widened(leaf, self.dtype)
            # A tensor of its own, also where one stands in several places.
            own = wide.view_as(wide) if around and wide.requires_grad else wide.detach().requires_grad_()
            return labels.alike(own, leaf)

        return structure.unflatten(spec, list(map(one, leaves)))

    @contextlib.contextmanager
    def differentiated(self, params, scale=None, sums: dict | None = None, beside: Any = ()) -> Iterator[Call]:
        """Context of one call, whose gradient is taken at its end. scale: multiplies what is differentiated. sums: of
        the whole batch; None: of these rows on all ranks, which is right where they are the batch. beside: tensors on
        the device, of which parameters in host memory need one."""
        call, began = Call(), last_recorded()
        around = torch.is_grad_enabled() and any(map(_differentiated_around, tree.leaves(params)))
        call.params = self._leaves_of(params, beside, around)
        _, leaves, spec = structure.flatten(call.params)
        known = [tree.layout_of(leaf) for leaf in leaves]
        with torch.enable_grad():
            yield call
            loss, parts, aux = self._read(call.returned)
            early, lines, shown = {}, {}, None
            if parts is not None:
                axes = self.axes_of(params)
                early, lines = before(parts, axes), lines_of(parts.values(), axes)
                sums = summed([early], axes, lines) if sums is None and early else sums or {}
                require_names(self.loss_fn, parts, aux)
                of_aux = {name: x for name, x in aux.items() if isinstance(x, Part)}
                loss, shown = terms(parts, of_aux, sums, axes, self.n)
                aux = {name: x for name, x in aux.items() if name not in of_aux}
            _require_gradient(self.loss_fn, loss)
            root = loss if scale is None else loss * scale.to(loss.dtype)
            if is_tracing():
                mark_backward([root.grad_fn])
            around = around or reaches_before(root, began)
            grads = torch.autograd.grad(root, leaves, allow_unused=True, create_graph=around)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]
        kept = (lambda x: x) if around else _without_history
        grads = [_knowing(kept(g), layout and self._raw(layout)) for g, layout in zip(grads, known, strict=True)]
        aux, grads = tree.map(kept, aux), structure.unflatten(spec, grads)
        if parts is None:
            call.gradient = Gradient({}, {}, {}, kept(loss), aux, None, grads)
        else:
            call.gradient = Gradient(early, sums or {}, lines, (), aux, shown, grads)

    def whole(self, found: Gradient, params) -> tuple[tuple[Any, Any], structure.Tree]:
        """((loss, aux), grads) of one call that is the whole batch."""
        if found.shown is None:
            return (found.loss, found.aux), found.grads
        loss, metrics = finished([found.shown], found.sums, self.axes_of(params))
        if any(g.requires_grad for g in tree.leaves(found.grads)):
            loss = _Shown.apply(described(self.loss_fn), torch.zeros((), requires_grad=True), loss)
        return (loss, {**metrics, **found.aux}), found.grads

    def _require_leaves(self, params, paths, leaves) -> None:
        if not leaves:
            raise ValueError(
                f"{described(self.loss_fn)}: its parameters: got {structure.in_words(params)}, wanted a tree with a "
                "tensor in it"
            )
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                module = "; of a module: dict(module.named_parameters())" if isinstance(leaf, torch.nn.Module) else ""
                raise ValueError(
                    f"parameter {path!r}: got {structure.in_words(leaf)}, wanted a tensor; pass constants as another "
                    f"argument{module}"
                )
            if not leaf.is_floating_point() and not leaf.is_complex():
                raise ValueError(
                    f"parameter {path!r}: got {leaf.dtype}, which has no gradient, wanted a floating dtype; pass it as "
                    "another argument, not among the parameters"
                )


def _differentiated_around(x: Any) -> bool:
    """Whether somebody differentiates what is made of x; of modules' parameters, which always say so, nobody may."""
    return isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, torch.nn.Parameter)


class _Shown(torch.autograd.Function):
    """The value of a loss of means, of which no gradient is taken: it would be zero in silence."""

    @staticmethod
    def forward(ctx, name, _, loss):
        ctx.name = name
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, _):
        raise ValueError(
            f"{ctx.name}: the loss that value_and_grad returned: got a gradient of it, wanted one of its gradients "
            "only, as a loss of means is a number to show; call loss_fn itself and take part.total / part.count"
        )


def _knowing(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    return x if layout is None else labels.labelled(x, layout)


_OF_JAX = MappingProxyType(
    {
        "has_aux": "leave it out: aux is given whenever loss_fn returns (loss, aux), and is {} otherwise",
        "argnums": "leave it out: the first argument is differentiated; put all of them into it, as one tree",
    }
)


def _require_own_arguments(dtype: Any, others: dict) -> None:
    """ValueError for arguments of other libraries' functions of this name, with what takes their place."""
    if not others and isinstance(dtype, torch.dtype | None):
        return
    name, value = next(iter(others.items()), ("argnums" if isinstance(dtype, int | tuple) else "dtype", dtype))
    fix = _OF_JAX.get(name, "arguments of loss_fn go to the function that value_and_grad returns")
    raise ValueError(f"value_and_grad: got {name}={value!r}, wanted a loss_fn and perhaps a torch dtype; {fix}")


def loss_and_aux(loss_fn: Callable, out: Any) -> tuple[Any, Any]:
    """(loss, aux) of what loss_fn returned: both, or the loss alone. ValueError for other numbers of values."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    if isinstance(out, tuple | list):
        raise ValueError(
            f"{described(loss_fn)}: its result: got {structure.in_words(out)}, wanted loss or (loss, aux); "
            "put all else that it returns into aux, a dict"
        )
    return out, {}


def _require_gradient(loss_fn: Callable, loss: Any) -> None:
    """ValueError unless a gradient of the loss can be taken."""
    if not isinstance(loss, torch.Tensor):
        got, fix = structure.in_words(loss), "keep it a tensor: no .item(), no float()"
        if loss is None:
            fix = "return it"
        elif isinstance(loss, dict):
            fix = "return the loss first and the rest behind it: return out['loss'], out"
        elif isinstance(loss, tuple):
            fix = "give loss_fn itself, and not value_and_grad of it"
    elif loss.dim() != 0:
        got, fix = f"a tensor of shape {tuple(loss.shape)}", "take its .mean() or .sum()"
    elif not loss.is_floating_point():
        got, fix = f"a tensor of {loss.dtype}", "counts, argmax and complex numbers have no gradient to follow"
    elif not loss.requires_grad:
        got = "a 0-d tensor without a gradient: it depends on no parameter, or it was detached"
        fix = "look for .detach(), .data, torch.no_grad(), argmax, comparisons and whole numbers on its way"
    else:
        return
    raise ValueError(
        f"{described(loss_fn)}: the loss: got {got}, wanted a 0-d floating tensor that depends on the parameters; {fix}"
    )


def _without_history(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x
