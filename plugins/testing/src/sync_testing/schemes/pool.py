"""The workers for a scheme's cases, and the base class of all cases."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import pytest
from torch import Tensor

from sync_core import PendingSend, Sender, SendError, SendReport, WorkerGroup, registry
from sync_plugin_std.workers import choose_group
from sync_testing.cases import Conformance
from sync_testing.faults import stop
from sync_testing.schemes.worker import Worker

_SIZE = 3
# A longer call counts as hung.
_PATIENCE = 30.0
# Several worker groups may be starting at once, on few cores.
_STARTING = 120.0
#: The longest time of the fastest of several attempts when no wait is needed, in seconds. A busy
#: machine delays single attempts; a protocol that waits on a timer delays all.
PROMPT = 1.0


def ended(calls: Collection[Future[Any]], what: str, seconds: float = _PATIENCE) -> list[Any]:
    """Return the results of calls; fail with a message if one does not end in time."""
    _, running = wait(calls, seconds)
    assert not running, f"{what} must end, but had not after {seconds:g} s"
    return [call.result() for call in calls]


class SharedGroup:
    """A worker group that is started when it is first needed.

    Args:
        group_class: the group.
    """

    def __init__(self, group_class: type[WorkerGroup]) -> None:
        self.group_class = group_class
        self.borrowers = 0
        self._group: WorkerGroup | None = None
        self._pids: dict[int, int] = {}
        # Workers that were killed, which the group may not have noticed yet.
        self._killed: set[int] = set()

    def make_ready(self) -> None:
        """Reset the workers, and replace those that a case has killed."""
        group = self._group
        if group is None or not self._revive(group):
            self.stop()
            group = self._group = self.group_class(Worker, _SIZE, timeout=_STARTING)
        calls = [group.call(i, Worker.reset) for i in group.worker_ids]
        pids = ended(calls, "close() of the receivers of the case before")
        self._pids = dict(zip(group.worker_ids, pids, strict=True))

    def submit(self, worker_id: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function on a worker."""
        assert self._group is not None
        return self._group.call(worker_id, function, *args)

    def call(self, worker_id: int, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function called on a worker."""
        call = self.submit(worker_id, function, *args)
        return ended([call], f"{getattr(function, '__name__', function)}() in worker {worker_id}")[
            0
        ]

    def signal(self, worker_id: int, number: signal.Signals) -> int:
        """Send a signal to a worker's process; return its id. After SIGSTOP, it has stopped."""
        pid = self._pids[worker_id]
        stop(pid) if number == signal.SIGSTOP else os.kill(pid, number)
        if number == signal.SIGKILL:
            self._killed.add(worker_id)
        return pid

    def restart(self, worker_id: int) -> None:
        """Replace a killed worker."""
        assert self._group is not None
        self._group.restart(worker_id)
        self._killed.discard(worker_id)
        self._pids[worker_id] = self.call(worker_id, Worker.reset)

    def stop(self) -> None:
        """Stop the workers."""
        if self._group is not None:
            self._group.stop()
            self._group = None
            self._killed.clear()

    def _revive(self, group: WorkerGroup) -> bool:
        dead = [i for i in group.worker_ids if i in self._killed or not group.alive(i)]
        if dead and "restart" not in self.group_class.capabilities:
            return False
        for worker_id in dead:
            self.restart(worker_id)
        return True


_pools: dict[type[WorkerGroup], SharedGroup] = {}


@contextmanager
def borrow_pool(group_class: type[WorkerGroup]) -> Iterator[SharedGroup]:
    """For ``with``: the pool of a group, which ends when its last borrower returns it."""
    pool = _pools.setdefault(group_class, SharedGroup(group_class))
    pool.borrowers += 1
    try:
        yield pool
    finally:
        pool.borrowers -= 1
        if not pool.borrowers:
            del _pools[group_class]
            pool.stop()


class Workers:
    """A sender, and the workers of a pool that it serves under the same ids.

    Args:
        sender: the sender.
        pool: the pool.
        make: makes a model other than the default in the workers.
        patience: the time limit of a worker's `receive`, in seconds.
    """

    def __init__(
        self,
        sender: Sender,
        pool: SharedGroup,
        make: Callable[[], Any] | None = None,
        *,
        patience: float = 20.0,
    ) -> None:
        self.sender = sender
        self.pool = pool
        self.patience = patience
        self.connect(*sender.all_worker_ids(), make=make)

    def connect(self, *worker_ids: int, make: Callable[[], Any] | None = None) -> None:
        """Let workers make their receivers."""
        calls = [
            self.pool.submit(i, Worker.connect, self.sender.address(i), make) for i in worker_ids
        ]
        ended(calls, "Receiver(address, model)")

    def submit(self, worker_id: int, timeout: float | None = None) -> Future[Any]:
        """Let a worker receive, without waiting for it."""
        return self.pool.submit(worker_id, Worker.receive, timeout)

    def stage_what_is_given_up(self) -> None:
        """Send the first version, give it up at once, and let worker 0 stage it anyway."""
        with pytest.raises(SendError):
            self.sender.send_async().wait(0.0)
        assert self.pool.call(0, Worker.stage) == 1

    def receive(self, worker_id: int, timeout: float | None = None) -> int | None:
        """Let a worker receive, and return the version."""
        seconds = self.patience if timeout is None else timeout
        call = self.submit(worker_id, seconds)
        version: int | None = ended([call], f"receive({seconds:g}) in worker {worker_id}")[0]
        return version

    def send(
        self,
        weights: Any = None,
        worker_ids: Iterable[int] | None = None,
        *,
        extras: Mapping[str, Tensor] | None = None,
    ) -> SendReport:
        """Send while the workers of this send receive."""
        pending = self.sender.send_async(weights, worker_ids, extras=extras)
        receivers = self.sender.all_worker_ids() if worker_ids is None else set(worker_ids)
        calls = [self.submit(worker_id, self.patience) for worker_id in receivers]
        try:
            return pending.wait()
        except SendError as error:
            for call in calls:
                if call.done() and call.exception() is not None:
                    error.add_note(f"receive() raised: {call.exception()}")
                elif call.done() and call.result() != pending.version:
                    error.add_note(f"receive() returned {call.result()}, not {pending.version}")
            raise
        finally:
            _, running = wait(calls, _PATIENCE)
            assert not running, f"receive({self.patience:g}) must end by its timeout"

    @staticmethod
    def give_up(pending: PendingSend, *late: int) -> SendReport:
        """Give up a send after all workers but the late ones have answered; return its report."""
        for worker_id, delivery in pending.unanswered.items():
            assert worker_id in late or delivery.wait(_PATIENCE), (
                f"worker {worker_id} receives, and its delivery must end"
            )
        with pytest.raises(SendError) as failure:
            pending.wait(0.0)
        return failure.value.report

    def values(self) -> list[set[float]]:
        """Return the values in each worker's parameters."""
        return [self.pool.call(i, Worker.values) for i in self.sender.all_worker_ids()]

    def fingerprints(self) -> list[dict[str, str]]:
        """Return the fingerprints of each worker's tensors."""
        return [self.pool.call(i, Worker.fingerprints) for i in self.sender.all_worker_ids()]


class Start(Protocol):
    """The fixture ``start``: makes a sender, and connects workers to it."""

    def __call__(
        self,
        model: Any,
        num_workers: int = 2,
        *,
        make: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Workers: ...


class SchemeCases(Conformance):
    """Base class of the cases; see `SchemeConformance` for the attributes."""

    scheme: ClassVar[Any]
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    group: ClassVar[str | type[WorkerGroup] | None] = None
    called: ClassVar[bool] = False
    slack: ClassVar[float] = 20.0
    sees_past_forks: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def moves_weights(self) -> None:
        """Skip the case if the scheme delivers no weights."""
        self.need_travelling()

    @pytest.fixture(scope="module")
    @classmethod
    def pool(cls) -> Iterator[SharedGroup]:
        """The workers, in the state after the last case."""
        with borrow_pool(choose_group([cls.scheme], cls.group)) as pool:
            yield pool

    @pytest.fixture
    def start(self, pool: SharedGroup) -> Iterator[Start]:
        """Return the function `Start`; its senders are closed at the end."""
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
        """Run the case twice: with and without copying at the commit."""
        flag = bool(request.param)
        if flag:
            self.need("zero_copy")
        return flag

    @pytest.fixture
    def parallel(self, pool: SharedGroup) -> None:
        """For cases in which a worker waits while the trainer does something."""
        if "parallel" not in pool.group_class.capabilities:
            pytest.skip("the workers run every call in the caller's thread")

    @pytest.fixture
    def asking(self) -> None:
        """For cases in which a worker decides when it receives, stages or commits."""
        if self.called:
            pytest.skip("the workers are called by the sender, and do not say when they receive")

    @pytest.fixture
    def alone(self) -> None:
        """For cases in which a worker commits while another one does nothing."""
        if self.can("all_or_none"):
            pytest.skip("a worker commits when all others have staged the version")

    @pytest.fixture
    def lasting(self) -> None:
        """For cases in which a worker commits a version that failed or was given up."""
        if self.can("aborts"):
            pytest.skip("a version that one worker cannot commit is committed by none")

    @pytest.fixture
    def processes(self, pool: SharedGroup) -> None:
        """For cases in which a process is killed or stopped."""
        if "cross_process" not in pool.group_class.capabilities:
            pytest.skip("the workers are in this process, which is not to be hurt")

    @classmethod
    def serve(
        cls,
        ends: ExitStack,
        pool: SharedGroup,
        model: Any,
        num_workers: int,
        *,
        make: Callable[[], Any] | None,
        **options: Any,
    ) -> Workers:
        """Make the sender and workers of `Start`; ``ends`` closes the sender."""
        sender = ends.enter_context(cls.sender(model, num_workers, **options))
        return Workers(sender, pool, make, patience=cls.slack)

    @classmethod
    def sender(cls, model: Any, num_workers: int = 1, **options: Any) -> Sender:
        """Make a sender of the scheme, or of a scheme that wraps it."""
        scheme = options.pop("scheme", cls.scheme)
        return Sender(scheme, model, num_workers=num_workers, **{**cls.options, **options})

    @classmethod
    def can(cls, capability: str) -> bool:
        """Return whether the scheme declares a capability."""
        return capability in registry.find(registry.SCHEMES, cls.scheme).capabilities

    @classmethod
    def need_travelling(cls) -> None:
        """Skip the case if the scheme delivers no weights."""
        if cls.can("same_object"):
            pytest.skip("workers act with the trainer's own object, so nothing travels")

    @classmethod
    def need_one_sender(cls) -> None:
        """Skip the case if a worker's version comes from several senders."""
        if cls.can("joined"):
            pytest.skip("versions of several senders are whole, and each worker has its address")

    @classmethod
    def need(cls, capability: str) -> None:
        """Skip the case unless the scheme declares a capability."""
        if not cls.can(capability):
            pytest.skip(f"the scheme does not declare {capability!r}")
