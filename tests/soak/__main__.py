"""`make soak`: what is too long for any tests, by name; each part prints its counts and fails where one is wrong.

python -m tests.soak                 all parts
python -m tests.soak fuzz --count 20000 --reader plan
"""

from __future__ import annotations

import sys
from importlib import import_module

PARTS = {
    "faults": "tests.soak.rank_faults:main",
    "saves": "tests.soak.rank_saves:main",
    "resumes": "tests.soak.rank_resumes:main",
    "elastic": "tests.soak.rank_resumes:elastic",
    "endurance": "tests.soak.endurance:main",
    "generation": "tests.soak.generation:main",
    "trainer": "tests.soak.trainer:main",
    "kernels": "tests.soak.kernels:main",
    "fuzz": "tests.soak.fuzz:main",
}
"""Name -> the function, of arguments, that returns 0 where all is well. The last one limits this process's memory."""


def main() -> int:
    """Run the part that is named first, with the arguments behind it, or all of them."""
    name, *arguments = sys.argv[1:] or ["all"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\nparts: {', '.join(PARTS)}")
        return 0
    if name not in {"all", *PARTS}:
        print(f"no part {name!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = []
    for part in PARTS if name == "all" else [name]:
        print(f"{part}:", flush=True)
        module, function = PARTS[part].split(":")
        results.append(getattr(import_module(module), function)(arguments))
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
