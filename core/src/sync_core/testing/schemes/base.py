"""What all cases build upon: the scheme, its workers, and what is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import pytest

from sync_core import Sender, registry
from sync_core.group_choice import choose_group
from sync_core.testing.cases import Conformance
from sync_core.testing.schemes.pool import Pool, Workers, borrow_pool
from sync_core.workers import WorkerGroup


class Start(Protocol):
    """Makes a sender, and connects workers to it."""

    def __call__(
        self,
        model: Any,
        num_workers: int = 2,
        *,
        make: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Workers: ...


class SchemeCases(Conformance):
    """Base of the cases; see `SchemeConformance` for the attributes."""

    scheme: ClassVar[Any]
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    group: ClassVar[str | type[WorkerGroup] | None] = None
    called: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def moves_weights(self) -> None:
        """A scheme without weights on the way has nothing that could arrive."""
        self.need_travelling()

    @pytest.fixture(scope="module")
    @classmethod
    def pool(cls) -> Iterator[Pool]:
        """The workers, as the last case has left them."""
        with borrow_pool(choose_group([cls.scheme], cls.group)) as pool:
            yield pool

    @pytest.fixture
    def start(self, pool: Pool) -> Iterator[Start]:
        """See `Start`; the senders are closed at the end."""
        with ExitStack() as ends:

            def start(
                model: Any,
                num_workers: int = 2,
                *,
                make: Callable[[], Any] | None = None,
                **options: Any,
            ) -> Workers:
                return self.serve(ends, pool, model, num_workers, make=make, **options)

            pool.make_ready()
            yield start

    @pytest.fixture(params=[False, True], ids=["copy", "zero_copy"])
    def zero_copy(self, request: pytest.FixtureRequest) -> bool:
        """Both ways of committing."""
        flag = bool(request.param)
        if flag:
            self.need("zero_copy")
        return flag

    @pytest.fixture
    def parallel(self, pool: Pool) -> None:
        """For cases in which a worker waits while the trainer does something."""
        if "parallel" not in pool.group_class.capabilities:
            pytest.skip("the workers run every call in the caller's thread")

    @pytest.fixture
    def asking(self) -> None:
        """For cases in which a worker says when it receives, stages or commits."""
        if self.called:
            pytest.skip("the workers are called by the sender, and do not say when they receive")

    @pytest.fixture
    def processes(self, pool: Pool) -> None:
        """For cases in which a process is killed or stopped."""
        if "cross_process" not in pool.group_class.capabilities:
            pytest.skip("the workers are in this process, which is not to be hurt")

    @classmethod
    def serve(
        cls,
        ends: ExitStack,
        pool: Pool,
        model: Any,
        num_workers: int,
        *,
        make: Callable[[], Any] | None,
        **options: Any,
    ) -> Workers:
        """Make what `Start` makes; ``ends`` closes it."""
        sender = ends.enter_context(cls.sender(model, num_workers, **options))
        return Workers(sender, pool, make)

    @classmethod
    def sender(cls, model: Any, num_workers: int = 1, **options: Any) -> Sender:
        """A sender of the scheme."""
        return Sender(cls.scheme, model, num_workers=num_workers, **{**cls.options, **options})

    @classmethod
    def can(cls, capability: str) -> bool:
        """Whether the scheme declares a capability."""
        return capability in registry.find(registry.SCHEMES, cls.scheme).capabilities

    @classmethod
    def need_travelling(cls) -> None:
        """Skip the case where the scheme moves nothing."""
        if cls.can("same_object"):
            pytest.skip("workers act with the trainer's own object, so nothing travels")

    @classmethod
    def need(cls, capability: str) -> None:
        """Skip the case where the scheme does not declare a capability."""
        if not cls.can(capability):
            pytest.skip(f"the scheme does not declare {capability!r}")
