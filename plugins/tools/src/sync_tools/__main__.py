"""Runs ``sync-core`` as ``python -m sync_tools``."""

import sys

from sync_tools.main import main

sys.exit(main())
