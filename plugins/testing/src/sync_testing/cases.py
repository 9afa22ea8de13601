"""The base class of all conformance classes: it forbids overriding cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


class Conformance:
    """Base class of the conformance classes.

    A subclass may override a case only to mark it as an expected failure, with a reason. Anything
    else raises an error when the class is defined, so when pytest collects it. The override keeps
    the marks of the case, such as its parameters. The marked case must fail: when it passes, remove
    the mark.

    Raises:
        TypeError: a subclass overrides a case and does not mark it as an expected failure.

    Example:
        >>> class Cases(Conformance):
        ...     def test_speed(self) -> None: ...
        >>> class TestMine(Cases):
        ...     test_speed = None
        Traceback (most recent call last):
        ...
        TypeError: TestMine overrides test_speed, a case that every plugin is to pass; ...
        >>> class TestMine(Cases):
        ...     @pytest.mark.xfail(reason="waits for issue 12", strict=True)
        ...     def test_speed(self) -> None:
        ...         super().test_speed()
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base, name, override in _written(cls):
            case = _after(cls, base, name)
            if not name.startswith("test") or case is None:
                continue
            marks = list(getattr(override, "pytestmark", ()))
            if not any(_expects_failure(mark) for mark in marks):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, a case that every plugin is to pass; if "
                    'it is known to fail, mark it @pytest.mark.xfail(reason="…", strict=True) '
                    f"and let it call super().{name}(…)"
                )
            inherited = [m for m in getattr(case, "pytestmark", ()) if id(m) not in map(id, marks)]
            override.pytestmark = [*inherited, *marks]


def _written(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Return the definitions in a class and its mixins that were not checked before."""
    for base in cls.__mro__:
        if base is cls or not issubclass(base, Conformance):
            yield from ((base, name, override) for name, override in vars(base).items())


def _after(cls: type, base: type, name: str) -> Any:
    """Return the next attribute in the method resolution order after ``base``."""
    later = cls.__mro__[cls.__mro__.index(base) + 1 :]
    return next((vars(other)[name] for other in later if name in vars(other)), None)


def _expects_failure(mark: pytest.Mark) -> bool:
    reason = mark.kwargs.get("reason")
    return mark.name == "xfail" and bool(reason) and mark.kwargs.get("strict") is True
