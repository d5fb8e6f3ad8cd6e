"""The import rule: pure layers need no torch, deepspeed, megatron or transformers."""

import ast
import importlib
import json
import os
import pkgutil
import sys
import tomllib
from pathlib import Path

import pytest

import gpp_plugin.config
from gpp_plugin.import_hook import MOVED
from tests.waits import run_program

PACKAGE = Path(__file__).parent.parent / "gpp_plugin"
HEAVY = {"torch", "deepspeed", "megatron", "transformers"}
PURE_LAYERS = ("ir", "config", "plan", "schedule", "simulate", "report", "data", "collage")
PURE_MODULES = ("errors", "plugins")
PROBE = f"""
import importlib, json, sys, time
start = time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
seconds = time.process_time() - start
print(json.dumps(dict(seconds=seconds, heavy=[m for m in {sorted(HEAVY)} if m in sys.modules])))
"""


def files_of(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Every module the file names in an import statement, at any depth, with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            found += [(node.lineno, node.module or "")]
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def importers(files: list[Path], *packages: str) -> str:
    """Return a line for each place in these files that imports one of the packages."""
    return "\n".join(
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}"
        for path in files
        for line, name in imported_modules(path)
        if name.split(".")[0] in packages
    )


@pytest.mark.parametrize("part", PURE_LAYERS + PURE_MODULES)
def test_pure_layer_names_no_heavy_import(part):
    files = files_of(part)
    assert files and all(path.is_file() for path in files), f"gpp_plugin/{part} is missing"
    assert not (wrong := importers(files, *HEAVY)), wrong


@pytest.mark.parametrize("package", ["deepspeed", "megatron", "transformers", "accelerate", "peft"])
def test_only_integrations_imports(package):
    allowed = {PACKAGE / "integrations", PACKAGE / "demo", PACKAGE / "doctor" / "checks.py"}
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not allowed & {path, *path.parents}]
    assert not (wrong := importers(files, package)), wrong


def test_megatron_core_is_imported_when_a_stage_is_built():
    """`chunks` derives from its classes; factories, transports and `gpp compare` are there without it."""
    for path in PACKAGE.rglob("*.py"):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert not any(node.module == "gpp_plugin.integrations.megatron.chunks" for node in top), path


def test_nothing_imports_benchmarks():
    """They are another package; `gpp bench` imports the one that is asked for by its name."""
    assert not (wrong := importers(sorted(PACKAGE.rglob("*.py")), "gpp_benchmarks")), wrong


def probe_import(names: list[str]) -> dict:
    """Import the modules in a fresh process; return its seconds and the heavy packages it loaded."""
    done = run_program(
        [sys.executable, "-c", PROBE, *names], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, f"importing {names} fails: {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def test_the_package_itself_loads_without_torch():
    assert probe_import(["gpp_plugin"])["heavy"] == []


def test_the_command_line_loads_no_library_before_it_knows_what_is_asked():
    names = ["numpy", "networkx", "torch", "rich"]
    probe = (
        f"import sys; from gpp_plugin import cli; sys.exit(' '.join(m for m in {names} if m in sys.modules))"
    )
    done = run_program([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "", f"gpp --help loads {done.stderr}"


def test_a_plain_model_trains_where_every_optional_library_is_broken():
    """Also where transformers is found but cannot be imported, as with a torchvision for another torch."""
    job = PACKAGE.parent / ".ci" / "wheel_job.py"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": PACKAGE.parent, "env": environment}
    done = run_program([sys.executable, str(job), "broken"], timeout=240, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    assert len(json.loads(line)["losses"]) == 2


def test_public_names_resolve_to_what_they_say():
    import gpp_plugin
    from gpp_plugin.ir.plan import PipelinePlan

    assert gpp_plugin.PipelinePlan is PipelinePlan
    assert set(gpp_plugin.__all__) <= set(dir(gpp_plugin))
    with pytest.raises(AttributeError, match="no attribute 'GraphPipelineModul'"):
        gpp_plugin.GraphPipelineModul  # noqa: B018


@pytest.mark.parametrize("before", ["", "import importlib.util; importlib.util.find_spec('deepspeed'); "])
def test_the_hook_waits_for_deepspeed_to_be_imported(before: str) -> None:
    """Also where another package looks for DeepSpeed first without importing it, as transformers does."""
    code = f"import gpp_plugin; {before}import deepspeed; print(deepspeed.initialize._gpp_plugin_original)"
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_documented_import_paths_of_before_still_load_and_warn():
    for old, new in MOVED.items():
        sys.modules.pop(old, None)
        with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
            module = importlib.import_module(old)
        assert module is pkgutil.resolve_name(new)


def test_a_function_that_moved_is_imported_from_its_package_of_before():
    sys.modules.pop("gpp_plugin.config.read_config", None)
    vars(gpp_plugin.config).pop("read_config", None)
    with pytest.warns(FutureWarning, match="gpp_plugin.config.read_config is now gpp_plugin.read_config"):
        from gpp_plugin.config import read_config
    assert read_config is gpp_plugin.read_config


LAYERS = tomllib.loads((PACKAGE.parent / ".ci" / "layers.toml").read_text())
ROOMS = [room["name"] for room in LAYERS["room"]]


def room_of(module: str) -> str:
    """Return the most specific room of `layers.toml` that a module (without the package's name) lies in."""
    found = [room for room in ROOMS if f"{module}.".startswith(f"{room}.")]
    assert found, f"{module} lies in no room of .ci/layers.toml; add its folder or file there"
    return max(found, key=len)


def test_imports_point_up_the_list_of_layers():
    modules = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__init__.py" and "patches" not in path.parts
    }
    down = {}
    for module, path in modules.items():
        for _, name in imported_modules(path):
            other = name.removeprefix("gpp_plugin.")
            while other and other not in modules:
                other = other.rpartition(".")[0]
            if name.startswith("gpp_plugin.") and other:
                if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module)):
                    down.setdefault(module, set()).add(other)
    allowed = LAYERS["allowed"]
    wrong = [
        f"{module} imports {other}, which stands below it in .ci/layers.toml"
        for module, others in down.items()
        for other in sorted(others)
        if not any(f"{other}.".startswith(f"{name}.") for name in allowed.get(module, ()))
    ]
    assert not wrong, "\n".join(wrong)
    gone = [
        f"{module} no longer imports {name}: take it out of [allowed]"
        for module, names in allowed.items()
        for name in names
        if not any(f"{other}.".startswith(f"{name}.") for other in down.get(module, ()))
    ]
    assert not gone, "\n".join(gone)
