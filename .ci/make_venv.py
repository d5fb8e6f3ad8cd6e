"""Make the environment that `make` installs into; where the calling Python has a torch for its GPU, that one is seen.

python .ci/make_venv.py FOLDER [--without-pip]

`python -m venv --system-site-packages` shows the packages of the Python installation. A Python that is itself of a
virtual environment is not one: a new environment made from it sees the packages of what that was made from. So where
torch is the caller's own a file in the new environment names the caller's folders too; what is installed into the new
environment comes first, and pip takes the others for installed.
"""

from __future__ import annotations

import argparse
import json
import site
import subprocess
import sys
from pathlib import Path

LEAST_TORCH = (2, 11)
SHOWN = "packages_of_the_caller.pth"
"""In the new environment: which folders of the caller's it sees, and whether it sees any."""

_ASK = """
import json
try:
    import torch
    print(json.dumps([torch.__version__, torch.__file__, torch.cuda.is_available()]))
except ImportError:
    print(json.dumps(None))
"""


def torch_of(python: str | Path) -> tuple[str, str] | None:
    """Return version and file of a torch for the GPU at hand that an interpreter imports; None where it has none."""
    done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None
    if found is None:
        return None
    version, file, has_gpu = found
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return (version, file) if has_gpu and numbers >= LEAST_TORCH else None


def make_venv(folder: Path, *, with_pip: bool = True) -> tuple[str, str] | None:
    """Make an environment at ``folder`` with this Python and return the torch of the caller's that it sees, if any."""
    wanted = torch_of(sys.executable)
    options = [] if with_pip else ["--without-pip"]
    if wanted is not None:
        options.append("--system-site-packages")
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / SHOWN).unlink(missing_ok=True)
    if wanted is None:
        return None
    # `addsitedir` and not the bare path: packages in the caller's folders may have such files of their own.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (own / SHOWN).write_text("\n".join(lines) + "\n")
    seen = torch_of(folder / "bin" / "python")
    if seen != wanted:
        found = "no torch" if seen is None else f"torch {seen[0]} of {seen[1]}"
        raise SystemExit(
            f"{folder} sees {found}, and {sys.executable} has torch {wanted[0]} of {wanted[1]}; "
            f"remove {folder}, or name another Python: make PYTHON=python3.12"
        )
    return wanted


def main() -> None:
    """Make the environment and say which torch it will have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-pip", action="store_true")
    args = parser.parse_args()
    seen = make_venv(args.folder, with_pip=not args.without_pip)
    if seen is not None:
        print(f"using torch {seen[0]} of {seen[1]}")


if __name__ == "__main__":
    main()
