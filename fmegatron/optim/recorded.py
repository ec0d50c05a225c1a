"""Recorded calls: the representation of an optimizer or transform is the call that made it, with all its arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T", bound=tuple)


def recorded(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, whose result (an Optimizer or a Transform) has the call as its `text`: "scale_by_lion(b1=0.9, b2=0.99)".

    Arguments that were left out and are None stay out.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **named: P.kwargs) -> T:
        result: Any = make(*args, **named)
        bound = signature.bind(*args, **named)
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
