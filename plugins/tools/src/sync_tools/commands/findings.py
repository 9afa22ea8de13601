"""Checks for `sync-core doctor`: imports, the machine, plugins, and a scheme's own findings."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from importlib_metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sync_core import registry
from sync_core.errors import OptionError, PluginConflictError, SyncError
from sync_core.hooks import Finding, FindingsContext, FindsProblems
from sync_core.registry import (
    OURS,
    DistributionInfo,
    Plugin,
    core_remedy,
    entry_points_of,
    installed_version,
    is_core,
    is_met,
    owner_of,
    requirements_of,
)

# Like a worker process, this one finds modules only through the sys.path of its parent.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; from sync_tools.main import main; "
    "sys.exit(main(['list', '--json']))"
)
# Separates the result from the output of a plugin's import.
_LIST = "\n["


def check_imports(timeout: float = 120.0) -> Iterator[Finding]:
    """Find layers and worker groups that do not load; the trials report schemes that do not load.

    Args:
        timeout: seconds to import all installed plugins.
    """
    try:
        listed = _list(timeout)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        how = "hangs" if isinstance(error, subprocess.TimeoutExpired) else "ends the process"
        yield Finding(
            "plugins",
            f"importing all that are installed {how}",
            "to see which, type: python -X faulthandler -X importtime -m sync_core list",
        )
        return
    _, _, text = f"\n{listed}".rpartition(_LIST)
    for plugin in json.loads(f"[{text}"):
        # Metadata distinguishes two distributions that claim the same name.
        if plugin["error"] and plugin["kind"] != "schemes" and not plugin["conflicts"]:
            owner = plugin["distribution"]
            update = registry.how_to_update(owner)
            first = plugin["error"].splitlines()[0].partition(f"; {update}")[0]
            problem, _, remedy = first.partition("; type: ")
            usual = f"{update}, or leave it out: SYNC_DISABLE={owner}"
            yield Finding(plugin["name"], problem, f"type: {remedy}" if remedy else usual)


def _list(timeout: float) -> str:
    path = [str(Path(folder).absolute()) for folder in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, *path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            listed, _ = process.communicate(timeout=timeout)
        finally:
            # Processes that a plugin starts when imported would keep the pipe open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "list")
    return listed


_MIB = 1 << 20
_SHARED = Path("/dev/shm")  # noqa: S108  # it is looked at, and not written to
# Docker's default for a container, too small for the tensors of a batch.
_DOCKER = 64 * _MIB
_NEARLY_FULL = 0.05
# A worker costs a sender one or two descriptors, and a Ray or RPC worker tens.
_FEW_DESCRIPTORS, _ENOUGH_DESCRIPTORS = 1024, 4096


def check_machine() -> Iterator[Finding]:
    """Return the findings about the machine."""
    with suppress(FileNotFoundError):  # only Linux has it
        usage = shutil.disk_usage(_SHARED)
        yield from shared_memory(usage.total, usage.free)
    yield from descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from threads(os.environ.get("OMP_NUM_THREADS", ""), _cores())


def shared_memory(total: int, free: int) -> Iterator[Finding]:
    """Return a finding if shared memory is too small or nearly full.

    Args:
        total: its size in bytes.
        free: the free bytes.
    """
    where = str(_SHARED)
    if total <= _DOCKER:
        yield Finding(
            where,
            f"holds {total // _MIB} MiB in all, too little for the tensors that processes share",
            "in a container, type: docker run --shm-size=8g …; elsewhere, as root: "
            f"mount -o remount,size=8G {where}",
        )
    elif free < _NEARLY_FULL * total:
        yield Finding(
            where,
            f"is nearly full: {free // _MIB} of {total // _MIB} MiB are free",
            f"see what is left over there, and remove what is not in use: ls -lS {where}",
        )


def descriptors(soft: int, hard: int) -> Iterator[Finding]:
    """Return a finding if the limit on open files, sockets and pipes is low.

    Args:
        soft: the limit in force.
        hard: the limit up to which a user may raise ``soft``.
    """
    if soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return
    remedy = "type: ulimit -n 4096"
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_DESCRIPTORS:
        remedy = f"the hard limit is {hard}, so root has to raise it: ulimit -Hn 4096"
    yield Finding(
        "ulimit -n",
        f"a process may open {soft} files and sockets, few where there are many workers",
        remedy,
    )


def threads(wanted: str, cores: int) -> Iterator[Finding]:
    """Return a finding if the number of threads does not fit the cores.

    If ``OMP_NUM_THREADS`` is not set, torch uses one thread per core, and worker groups divide the
    cores among their workers.

    Args:
        wanted: the value of ``OMP_NUM_THREADS``; the first one, if it is a list.
        cores: the cores that this process may use.
    """
    about = f"OMP_NUM_THREADS={wanted}"
    first = wanted.partition(",")[0].strip()
    if not first:
        return
    if not first.isdecimal() or int(first) == 0:
        yield Finding(about, "is not a number of threads", "type: unset OMP_NUM_THREADS")
    elif int(first) > cores:
        yield Finding(
            about,
            f"is more than the {cores} cores that this process may use, and each process starts "
            "so many threads",
            "type: unset OMP_NUM_THREADS",
        )
    elif int(first) == 1 < cores:
        yield Finding(
            about,
            f"the trainer computes and copies with one of {cores} cores, as torchrun sets it "
            "where it is not set",
            f"type: export OMP_NUM_THREADS={cores}, divided by the trainers on this machine",
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if _SHARED.exists() else os.cpu_count() or 1


_GROUPS = (registry.SCHEMES, registry.LAYERS, registry.WORKERS)


def check_plugins() -> Iterator[Finding]:
    """Return the findings about the plugins."""
    yield from disabled()
    yield from conflicts()
    yield from unmet_requirements()


def disabled() -> Iterator[Finding]:
    """Return findings about plugins disabled by ``SYNC_DISABLE``, and about unknown names in it."""
    value = os.environ.get(registry.DISABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    claimed = [(group, entry) for group in _GROUPS for entry in entry_points_of(group)]
    out = [registry.describe(g, entry) for g, entry in claimed if registry.is_disabled(entry)]
    if out:
        yield Finding(
            f"{registry.DISABLE}={value}",
            f"leaves out {', '.join(out)}",
            f"to use them, type: unset {registry.DISABLE}",
        )
    known = {entry.name for _, entry in claimed}
    known |= {owner for _, entry in claimed if (owner := owner_of(entry)[0]) is not None}
    for name in names:
        if name not in known:
            yield Finding(
                f"{registry.DISABLE}={value}",
                f"nothing that is installed is called {name!r}",
                "take it out, or see the names: sync-core list",
            )


def conflicts() -> Iterator[Finding]:
    """Return findings about names that several distributions claim."""
    for group in _GROUPS:
        for name in sorted({entry.name for entry in registry.installed(group)}):
            try:
                registry.entry_point(group, name)
            except PluginConflictError as error:
                problem, _, remedy = str(error).partition("; ")
                yield Finding(name, problem, remedy)


def unmet_requirements() -> Iterator[Finding]:
    """Return findings about distributions whose requirements are missing or have an unfit version.

    Requirements of extras are not checked.
    """
    for each in _distributions().values():
        for requirement in requirements_of(each):
            if is_met(requirement):
                continue
            there = installed_version(requirement)
            yield Finding(
                f"{each.name} {each.version}",
                f"needs {requirement}, and {f'{there} is' if there else 'none is'} installed",
                _how_to_meet(each, requirement),
            )


def _how_to_meet(asking: DistributionInfo, requirement: Requirement) -> str:
    if is_core(requirement):
        return core_remedy(asking.name, requirement)
    if canonicalize_name(asking.name) in OURS:
        return f"type: pip install '{requirement.name}{requirement.specifier}'"
    return f"install it again with what it needs: {registry.how_to_update(asking.name)}"


def _distributions() -> dict[str, DistributionInfo]:
    found: dict[str, DistributionInfo] = {}
    with suppress(PackageNotFoundError):  # not installed: only its sources are on the path
        found["sync-core"] = distribution("sync-core")
    for group in _GROUPS:
        for entry in registry.installed(group):
            if entry.dist is not None:
                found[entry.dist.name] = entry.dist
    return found


def check_scheme(
    name: str, timeout: float = 10.0, options: Mapping[str, Any] = MappingProxyType({})
) -> list[Finding]:
    """Return the findings of a scheme that has a method ``findings``.

    A scheme that does not load, or refuses the options, has no findings: its trial reports the
    error.

    Args:
        name: the scheme's name.
        timeout: seconds to wait for the scheme, which is left running after that.
        options: the scheme's options.
    """
    try:
        plugin = registry.find(registry.SCHEMES, name)
    except SyncError:
        return []
    if not isinstance(plugin.object, FindsProblems):
        return []
    found: Future[list[Finding]] = Future()
    context = FindingsContext(scheme=name, options=options)
    threading.Thread(target=_ask, args=(plugin, context, found), daemon=True).start()
    try:
        return found.result(timeout)
    except TimeoutError:
        return [_complaint(plugin, f"its findings() took more than {timeout:g} s")]
    except OptionError:
        return []
    except Exception as error:
        return [_complaint(plugin, f"its findings() raised {type(error).__name__}: {error}")]


def _ask(plugin: Plugin, context: FindingsContext, found: Future[list[Finding]]) -> None:
    try:
        findings = list(plugin.object.findings(context))
        # Nor its own class of error: the parent process could not unpickle it without the plugin.
        strangers = [each for each in findings if type(each) is not Finding]
        if strangers:
            raise TypeError(
                f"it gave {strangers[0]!r:.80}, which is not a sync_core.transports.Finding"
            )
    except BaseException as error:
        found.set_exception(error)
    else:
        found.set_result(findings)


def _complaint(plugin: Plugin, problem: str) -> Finding:
    remedy = f"{registry.how_to_update(plugin.distribution)}, or tell its author"
    return Finding(plugin.describe(), problem.splitlines()[0], remedy)
