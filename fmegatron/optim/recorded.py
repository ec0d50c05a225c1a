"""Recorded calls: the representation of an optimizer or transform is the call that made it, with all its arguments."""

import functools
import inspect
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

_OF_OTHERS = MappingProxyType(  # names of torch and optax -> what takes their place
    {
        "params": "leave it out: parameters are an argument of init and update",
        "lr": "the rate comes first, without a name; parameters are an argument of init and update",
        "betas": "give b1 and b2",
        "mask": "give decay=, a list of patterns of paths, or use optim.grouped",
    }
)
P = ParamSpec("P")
T = TypeVar("T", bound=tuple)


def recorded(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, whose result (an Optimizer or a Transform) has the call as its `text`: "scale_by_lion(b1=0.9, b2=0.99)".

    Arguments that were left out and are None stay out.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **named: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            fix = next((fix for name, fix in _OF_OTHERS.items() if name in named), "see its docstring")
            wanted = ", ".join(signature.parameters)
            raise TypeError(f"{make.__name__}: got arguments with {error}, wanted ({wanted}); {fix}") from None
        result: Any = make(*args, **named)
        bound.apply_defaults()
        words = []
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                words += [f"{key}={_text(one)}" for key, one in value.items()]
            elif kind is not inspect.Parameter.VAR_POSITIONAL and value is not None:
                words.append(f"{name}={_text(value)}")
        return result._replace(text=f"{make.__name__}({', '.join(words)})")

    return made


def _text(value: Any) -> str:
    if inspect.isroutine(value):
        return getattr(value, "__name__", "a function")
    return "{...}" if isinstance(value, dict) else repr(value)
