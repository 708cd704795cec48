"""``python -m dormouse.demo``: see ``--help``."""

import sys

from .cli import main

sys.exit(main())
