"""``python -m dormouse.headline``: see ``--help``."""

import sys

from .cli import main

sys.exit(main())
