"""What a scheme itself finds amiss, asked in the process that tries it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from sync_core.errors import SyncError
from sync_core.plugins import registry
from sync_core.plugins.finding import Finding
from sync_core.plugins.registry import Plugin


def find(name: str, timeout: float = 10.0) -> list[Finding]:
    """What a scheme finds that declares the capability ``findings``; else nothing.

    Of one that does not load, trying it says so.

    Args:
        name: the scheme's name.
        timeout: seconds after which it is not waited for; it is left running.
    """
    try:
        plugin = registry.find(registry.SCHEMES, name)
    except SyncError:
        return []
    if "findings" not in plugin.capabilities:
        return []
    found: Future[list[Finding]] = Future()
    threading.Thread(target=_ask, args=(plugin, found), daemon=True).start()
    try:
        return found.result(timeout)
    except TimeoutError:
        return [_complaint(plugin, f"its findings() took more than {timeout:g} s")]
    except Exception as error:
        return [_complaint(plugin, f"its findings() raised {type(error).__name__}: {error}")]


def _ask(plugin: Plugin, found: Future[list[Finding]]) -> None:
    try:
        findings = list(plugin.object.findings())
        # Nor a class of its own, which the process that asks could not read without the plugin.
        strangers = [each for each in findings if type(each) is not Finding]
        if strangers:
            raise TypeError(f"it gave {strangers[0]!r:.80}, which is no sync_core.Finding")
    except BaseException as error:
        found.set_exception(error)
    else:
        found.set_result(findings)


def _complaint(plugin: Plugin, problem: str) -> Finding:
    remedy = f"type: pip install -U {plugin.distribution}, or tell its author"
    return Finding(plugin.describe(), problem.splitlines()[0], remedy)
