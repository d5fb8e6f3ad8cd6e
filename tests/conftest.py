"""The environment of tests and of what they start: one thread a process, compiled modules, profiles of this run."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process started compiles this package anew
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the directory of the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gpp-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
