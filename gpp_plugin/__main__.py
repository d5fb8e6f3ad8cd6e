"""``python -m gpp_plugin``: the ``gpp`` command, where its script is not on the path."""

import sys

from gpp_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
