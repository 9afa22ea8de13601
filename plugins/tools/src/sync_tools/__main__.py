"""``python -m sync_tools`` is ``sync-core``."""

import sys

from sync_tools.main import main

sys.exit(main())
