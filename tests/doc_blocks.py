"""The fenced code of README and docs, and the ranks that run a page's Python.

A page's Python is one program: its blocks run in order, in one namespace, on as many ranks as it says. HTML comments,
which no reader sees, say what else there is to know::

    <!-- ranks: 2 -->             how many ranks run the page; without it, one process that joins no group
    <!-- needs: megatron.core -->  skipped where that is not installed
    <!-- setup                    Python that runs where it stands: what a reader has already
    model = ...
    -->
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LANGUAGES = ("python", "json", "console", "toml", "diff", "text")
"""``text`` is what is no code: output, pictures and file trees; ``diff`` a change to a reader's script."""
_FENCE = re.compile(
    r"^```(?P<language>[^\n]*)\n(?P<fenced>.*?)^```$|^<!-- setup\n(?P<setup>.*?)^-->$", re.M | re.S
)
_MARK = re.compile(r"^<!-- (?P<name>ranks|needs): (?P<value>.+) -->$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Fenced code, or hidden setup, and the line it starts in."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Return where it stands, as editors read it."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A document: its blocks, and what its marks say."""

    name: str
    text: str
    blocks: tuple[Block, ...]
    num_ranks: int
    needs: tuple[str, ...]


def read_page(path: Path) -> Page:
    """Return a document's blocks in their order."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    blocks = []
    for match in _FENCE.finditer(text):
        is_setup = match["setup"] is not None
        blocks.append(
            Block(
                page=name,
                line=text.count("\n", 0, match.start()) + 1,
                language="setup" if is_setup else match["language"],
                text=match["setup"] if is_setup else match["fenced"],
            )
        )
    marks = [(match["name"], match["value"]) for match in _MARK.finditer(text)]
    return Page(
        name=name,
        text=text,
        blocks=tuple(blocks),
        num_ranks=next((int(value) for key, value in marks if key == "ranks"), 0),
        needs=tuple(value for key, value in marks if key == "needs"),
    )


def read_pages() -> list[Page]:
    """Return README, ARCHITECTURE, CONTRIBUTING and everything in docs/."""
    top = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    paths = [*top, *sorted((ROOT / "docs").rglob("*.md"))]
    return [read_page(path) for path in paths]


def commands_of(block: Block) -> list[list[str]]:
    """Return the command lines of a console block: those after ``$``; a backslash continues a line."""
    joined = block.text.replace("\\\n", " ")
    return [shlex.split(line[2:], comments=True) for line in joined.splitlines() if line.startswith("$ ")]


def run_page(page: Page, folder: Path) -> None:
    """Run the Python of a page in ``folder``, which all ranks share, with the examples and configurations in it.

    Raises:
        AssertionError: a block failed; the message names it.
    """
    namespace: dict[str, Any] = {"__name__": f"page_{Path(page.name).stem}"}
    with contextlib.chdir(folder):
        for name in ("configs", "examples"):
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.symlink(ROOT / name, name)
        for block in page.blocks:
            if block.language in ("python", "setup"):
                try:
                    exec(compile(block.text, block.place, "exec", dont_inherit=True), namespace)
                except Exception as error:
                    raise AssertionError(f"the code at {block.place} failed: {error!r}") from error
