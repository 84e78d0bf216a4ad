"""``python -m kamera_cli``."""

import sys

from kamera_cli.app import main

sys.exit(main())
