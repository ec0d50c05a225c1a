"""A mixer around another mixer, such as an adapter: it writes hooks, and everything else is that of the inner one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fmegatron.layout import Mesh
from fmegatron.model.arrays import Arrays, TokenContext
from fmegatron.model.mixer import Cache, Mixer, Order, Rule, Slots, Widths, require_mixer, require_rates
from fmegatron.step import Part
from fmegatron.tree import structure

HOOKS = ("name", "own", "own_rates", "weights", "given", "result")
# What a subclass may extend, with super(): it belongs to plans and meshes. All else is final: training, generation and
# counts must go the same way.
_EXTENDED = ("check_mesh", "products", "sends", "widths", "order")


@dataclass(frozen=True)
class Wrapped(Mixer):
    """A mixer around `inner`, with arrays of its own beside the inner ones, whose paths stay what they are.

        @dataclass(frozen=True)
        class Beside(model.Wrapped):
            width: int

            def own(self, dim):
                up = model.Array((self.width, dim), (None, "fsdp"), init=0.0)
                return {"down": model.Array((dim, self.width), ("fsdp",)), "up": up}

            def result(self, y, u, own, at):
                return y + torch.relu(u @ own["down"]) @ own["up"]

    A subclass writes hooks: `own`, `own_rates`, `weights`, `given`, `result`, and `name`, under which its arrays are
    kept (another for each of several wrappers around each other). In `given` and `result` no token looks at another,
    since generation calls them with new tokens alone. It may extend check_mesh, products, sends, widths and order.

    TypeError, when it is defined, for a subclass with a `__call__` or `read` of its own, or other methods of
    `Mixer`: an adapter that only the call knows would be missing in generated texts, without an error.
    """

    inner: Mixer
    name: ClassVar[str] = "own"

    def __init_subclass__(cls, **options: object) -> None:
        """TypeError for a subclass that defines, or inherits from elsewhere, what is final."""
        mine, fields = inspect.getattr_static, inspect.get_annotations(cls)
        for name in ("__call__", *(name for name in vars(Mixer) if not name.startswith("_"))):
            if name not in _EXTENDED and (name in fields or mine(cls, name) is not mine(Wrapped, name)):
                raise TypeError(
                    f"{cls.__name__}.{name}: got one of its own in a model.Wrapped, wanted hooks only "
                    f"({', '.join(HOOKS)}), so that training and generation go the same way; write given for what goes "
                    "in and result for what comes out, or derive it from model.Mixer"
                )
        super().__init_subclass__(**options)

    # ---- hooks -------------------------------------------------------------------------------------------------------
    def own(self, dim: int) -> dict[str, Arrays]:
        """Arrays of its own, in a model of width `dim`."""
        return {}

    @property
    def own_rates(self) -> dict[str, float]:
        """As `rates`, of its own, which are fields: where `at.draws` is None, nothing is drawn."""
        return {}

    def weights(self, w: dict, own: dict, at: TokenContext) -> dict:
        """The arrays that the inner mixer is given, of its arrays w."""
        return w

    def given(self, u_BSD: Tensor, own: dict, at: TokenContext) -> Tensor:
        """The stream that the inner mixer is given."""
        return u_BSD

    def result(self, y_BSD: Tensor, u_BSD: Tensor, own: dict, at: TokenContext) -> Tensor:
        """What is added to the stream, of what the inner mixer made (y) and of what came in (u)."""
        return y_BSD

    # ---- final: through the hooks ------------------------------------------------------------------------------------
    def arrays(self, dim: int) -> Arrays:
        """Those of the inner mixer, and its own under `name`. ValueError where the inner one has that name."""
        inner, own = self.inner.arrays(dim), self.own(dim)
        if self._keeps and isinstance(inner, dict) and self.name not in inner:
            return {**inner, self.name: own} if own else inner
        if self._keeps:
            raise ValueError(
                f"{type(self).__name__}.name: got {self.name!r} beside the arrays {inner!r:.80}, wanted a name that "
                "the inner mixer has not; set name of the class to another"
            )
        return inner

    @property
    def _keeps(self) -> bool:
        """Whether its class has arrays of its own; if not, `name` may be that of a wrapper inside."""
        return type(self).own is not Wrapped.own

    def _parted(self, w: Any) -> tuple[Any, dict]:
        """(the arrays of the inner mixer, its own)."""
        if not self._keeps or self.name not in w:
            return w, {}
        return {k: v for k, v in w.items() if k != self.name}, w[self.name]

    def _require(self, where: str) -> None:
        require_mixer(self.inner, f"{where}.inner")
        require_rates(self, self.own_rates, where, "own_rates")

    def _through(self, run: Callable, u_BSD: Tensor, w: Any, at: TokenContext) -> tuple[Any, Cache]:
        inner, own = self._parted(w)
        y, cache = run(self.given(u_BSD, own, at), self.weights(inner, own, at))
        y_BSD, *statistics = y if isinstance(y, tuple) else (y,)
        y_BSD = self.result(y_BSD, u_BSD, own, at)
        return ((y_BSD, *statistics) if statistics else y_BSD), cache

    def __call__(self, u_BSD: Tensor, w: structure.Tree, at: TokenContext) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The inner mixer, between the hooks."""
        return self._through(lambda u, w: (self.inner(u, w, at), None), u_BSD, w, at)[0]

    def read(
        self, u_BSD: Tensor, w: structure.Tree, at: TokenContext, cache: Cache, slots: Slots | None
    ) -> tuple[Any, Cache]:
        """`Mixer.read` of the inner mixer, between the hooks."""
        return self._through(lambda u, w: self.inner.read(u, w, at, cache, slots), u_BSD, w, at)

    def new_cache(self, one: Cache, rows: int, slots: int) -> Cache:
        """That of the inner mixer."""
        return self.inner.new_cache(one, rows, slots)

    def post_update(self, w: dict, statistics: dict[str, Tensor]) -> dict:
        """The inner mixer's arrays are set, its own stay."""
        inner, own = self._parted(w)
        found = self.inner.post_update(inner, statistics)
        return {**found, self.name: own} if own else found

    def losses(self, statistics: dict[str, Tensor], tokens: Tensor | int) -> dict[str, Part]:
        """Those of the inner mixer."""
        return self.inner.losses(statistics, tokens)

    @property
    def rates(self) -> dict[str, float]:
        """Those of the inner mixer, and its own behind `name` and a dot."""
        return {**self.inner.rates, **{f"{self.name}.{name}": rate for name, rate in self.own_rates.items()}}

    def without_rates(self) -> Mixer:
        """Both without."""
        return dataclasses.replace(self, inner=self.inner.without_rates(), **dict.fromkeys(self.own_rates, 0.0))

    # ---- what the inner mixer answers --------------------------------------------------------------------------------
    @property
    def rope(self):  # pyright: ignore[reportIncompatibleVariableOverride]  (no field: it is the inner one's)
        """That of the inner mixer."""
        return self.inner.rope

    @property
    def order(self) -> Order:
        """That of the inner mixer."""
        return self.inner.order

    @property
    def rule(self) -> Rule | None:
        """That of the inner mixer."""
        return self.inner.rule

    @property
    def cache_width(self) -> int | None:
        """That of the inner mixer."""
        return self.inner.cache_width

    def check_mesh(self, mesh: Mesh) -> None:
        """That of the inner mixer."""
        self.inner.check_mesh(mesh)

    def products(self, seq_len: int, causal: bool) -> float | None:
        """Those of the inner mixer; products with its own arrays are counted as all are."""
        return self.inner.products(seq_len, causal)

    @property
    def couples(self) -> tuple[str, ...]:
        """That of the inner mixer; of hooks that couple rows, overridden."""
        return self.inner.couples

    def sends(self, mesh: Mesh) -> tuple[str, ...]:
        """That of the inner mixer."""
        return self.inner.sends(mesh)

    def widths(self, dim: float, tp: int, number: int) -> Widths | None:
        """Those of the inner mixer; that what the hooks keep is not counted is said in plans."""
        found = self.inner.widths(dim, tp, number)
        return found and dataclasses.replace(found, uncounted=(*found.uncounted, f"what {type(self).__name__} keeps"))
