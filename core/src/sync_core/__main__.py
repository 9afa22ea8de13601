"""``python -m sync_core`` is ``sync-core``."""

import sys

from sync_core.cli import main

sys.exit(main())
