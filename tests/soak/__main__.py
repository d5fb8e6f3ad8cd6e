"""`make soak`: what is too long for `make test`, by name; each part prints its counts and fails where one is wrong.

python -m tests.soak                 all parts
python -m tests.soak fuzz --count 20000 --reader plan
"""

from __future__ import annotations

import sys
from importlib import import_module

PARTS = {
    "faults": "tests.soak.rank_faults",
    "fuzz": "tests.soak.fuzz",
    "generation": "tests.soak.generation",
    "tables": "tests.soak.tables",
}
"""Name -> the module whose ``main(arguments)`` returns 0 where all is well."""


def main() -> int:
    """Run the part that is named first, with the arguments behind it, or all of them."""
    name, *arguments = sys.argv[1:] or ["all"]
    if name not in {"all", *PARTS}:
        print(f"no part {name!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = []
    for part in PARTS if name == "all" else [name]:
        print(f"{part}:", flush=True)
        results.append(import_module(PARTS[part]).main(arguments))
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
