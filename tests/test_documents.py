"""README and docs: generated pages are up to date, code blocks run, names exist, links and pages are listed."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from gpp_plugin.cli import _make_parser, main
from gpp_plugin.config.reader import batch_arithmetic, load_deepspeed_json, read_config
from tests.doc_blocks import LANGUAGES, ROOT, Block, Page, commands_of, read_pages, run_page
from tests.ranks import run_kept_ranks
from tests.waits import run_program

PAGES = read_pages()
BLOCKS = [block for page in PAGES for block in page.blocks]
QUICK = {"plan", "simulate", "report"}
"""Sub-commands that are run, and not only parsed."""
OTHER_PROGRAMS = {".ci/run", "cd", "git", "make", "mkdocs", "patch", "pip", "python", "python3", "ruff"}


def is_installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "docs.py"), "--check"]
    done = run_program(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_fence_says_what_it_is() -> None:
    wrong = [block.place for block in BLOCKS if block.language not in (*LANGUAGES, "setup")]
    assert not wrong, f"one of {LANGUAGES} is missing behind the fence: {wrong}"


@pytest.mark.parametrize(("name", "lines"), [("README.md", 120), ("ARCHITECTURE.md", 130)])
def test_what_strangers_read_first_is_short(name: str, lines: int) -> None:
    assert (ROOT / name).read_text().count("\n") <= lines


def test_each_release_has_sixty_lines_in_the_changelog() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    numbered = [text for text in releases if not text.startswith("[Unreleased]")]
    assert numbered and max(text.strip().count("\n") for text in numbered) <= 60


def sentence_lengths(text: str) -> list[int]:
    """Return the words of each sentence, list item and cell of a page, in ascending order; code is left out."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S)
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n[-*|#] ?|\|", prose)
    return sorted(len(part.split()) for part in parts if len(part.split()) > 2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Page) -> None:
    """Those of docs/commands.md and docs/configuration.md are help texts and docstrings of the source."""
    lengths = sentence_lengths(page.text)
    assert sum(lengths) / len(lengths) <= 16, "words a sentence, on average"
    assert lengths[int(0.9 * len(lengths))] <= 28, "words of the longest tenth of the sentences"


def test_cells_of_the_state_are_short() -> None:
    """At most a dozen words a cell; commands in backticks are not words."""
    rows = [line for line in (ROOT / "docs" / "state.md").read_text().splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.sub(r"`[^`]*`", "", row).split("|")]
    assert [cell for cell in cells if len(cell.split()) > 12] == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" for b in p.blocks)], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page: Page, tmp_path: Path) -> None:
    missing = [name for name in page.needs if not is_installed(name)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if page.num_ranks:
        run_kept_ranks(run_page, page.num_ranks, page, tmp_path, timeout_s=240)
    else:
        run_page(page, tmp_path)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=lambda block: block.place)
def test_a_configuration_is_accepted(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(block.text if block.text.lstrip().startswith("{") else f"{{{block.text}}}")
    assert read_config(path) is not None, "there is no graph_pipeline block in it"
    if "train_batch_size" in load_deepspeed_json(path):
        assert batch_arithmetic(path, num_ranks=4)[0] >= 1


@pytest.mark.parametrize("page", [page for page in PAGES if "$ " in page.text], ids=lambda page: page.name)
def test_commands_are_understood(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page: a plan that one command writes is read by the next."""
    monkeypatch.chdir(tmp_path)
    for block in page.blocks:
        for words in commands_of(block) if block.language == "console" else []:
            check_command(words, block.place)


def check_command(words: list[str], place: str) -> None:
    program, *arguments = words
    if program == "gpp":
        parser, _ = _make_parser(arguments)
        try:
            args = parser.parse_args(arguments)
        except SystemExit as error:  # --help ends with 0
            assert error.code == 0, f"{place}: {' '.join(words)} is not understood"
            return
        assert args.command not in QUICK or main(arguments) == 0, f"{place}: {' '.join(words)} failed"
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in arguments if "=" not in word} <= set(targets), f"{place}: no such target"
    elif program in ("deepspeed", "torchrun"):
        scripts = [word for word in arguments if word.endswith(".py") and word.startswith("examples/")]
        assert scripts or "train.py" in arguments, (
            f"{place}: {program} starts neither an example nor train.py"
        )
        assert all((ROOT / script).is_file() for script in scripts), f"{place}: {scripts} are not there"
    else:
        assert program in OTHER_PROGRAMS, f"{place}: {program} is no program that a reader has"


def test_names_in_the_text_exist() -> None:
    """Every `gpp_plugin.x.y` is a module, or something that a module defines."""
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        if all(map(is_installed, page.needs))
        for name in sorted(set(re.findall(r"`((?:gpp_plugin|gpp_benchmarks)(?:\.\w+)+)", page.text)))
        if not exists(name)
    ]
    assert not wrong, "\n".join(wrong)


def exists(name: str) -> bool:
    """Say whether a dotted name is a module or is defined in one, without importing it."""
    parts = name.split(".")
    root = ROOT / "benchmarks" if parts[0] == "gpp_benchmarks" else ROOT
    for length in range(len(parts), 0, -1):
        folder = root.joinpath(*parts[:length])
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if path.is_file():
            # defined in its text, imported, or (as in a table of lazy names) written
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", path.read_text()) is not None
    return False


def test_files_in_the_text_exist() -> None:
    """Every file of the repository that a page names in backticks or links to is there."""
    wrong = []
    for page in PAGES:
        folder = (ROOT / page.name).parent
        links = {
            link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.text) if "://" not in link
        }
        wrong += [f"{page.name}: {link}" for link in links - {""} if not (folder / link).exists()]
        named = re.findall(r"`((?:tests|examples|configs|patches|docs|\.ci)/[\w./-]+)`", page.text)
        wrong += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not wrong, "\n".join(wrong)


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    missing = [
        page.name for page in PAGES if page.name.startswith("docs/") and f" {page.name[5:]}\n" not in menu
    ]
    assert missing == []
