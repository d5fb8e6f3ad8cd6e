"""Found by every interpreter that `make mutants` starts, those of ranks and commands included."""

import os
import sys

if "GPP_FAULT" in os.environ or "GPP_REACH" in os.environ:
    sys.path.append(os.environ["GPP_MUTANTS_ROOT"])
    from tests.mutants import import_hook

    import_hook.install()
