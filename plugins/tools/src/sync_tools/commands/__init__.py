"""The commands of ``sync-core``, one module each; a command is imported when it is used."""

from sync_tools.command import Command

LIST = Command("schemes, layers and worker groups installed here", f"{__name__}.listing")
DOCTOR = Command(
    "does each installed scheme really move weights on this machine?", f"{__name__}.doctor"
)
BENCH = Command("seconds, GB/s, and the share of this machine's copy limit", f"{__name__}.bench")
PLAN = Command("seconds and memory of an update of your model, by each scheme", f"{__name__}.plan")
WATCH = Command(
    "the workers of a running sender: state, version, lag, last error", f"{__name__}.watch"
)
REPORT = Command(
    "an HTML page of the sends that the layer Record has written", f"{__name__}.report"
)
CHECK_HISTORY = Command(
    "did a run keep its promises? judges what the layer History has written",
    f"{__name__}.check_history",
)
NEW_PLUGIN = Command(
    "write a distribution that passes the conformance suite as generated",
    f"{__name__}.new_plugin",
)
