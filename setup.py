"""Package metadata of gpp_plugin; tool settings are in pyproject.toml, pinned versions in constraints.txt."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    """Return ``__version__`` of the package without importing it, and so without what it needs."""
    tree = ast.parse((HERE / "gpp_plugin" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise RuntimeError("gpp_plugin/__init__.py assigns no __version__")


EXTRAS = {
    "hf": ["transformers>=5.17", "tokenizers>=0.22"],
    "megatron": ["megatron-core>=0.16"],
    "report": ["pillow>=10.1", "tensorboard>=2.18"],
    "plots": ["matplotlib>=3.8"],
    "demo": ["transformers>=5.17", "scikit-learn>=1.5"],
    "completion": ["shtab>=1.7"],
    "onnxruntime": ["onnxruntime>=1.32", "onnxscript>=0.7", "onnx>=1.23"],
    "openvino": ["openvino>=2026.4"],
    "trainer": ["accelerate>=1.1", "transformers>=5.17"],
    "trl": ["accelerate>=1.10.1", "datasets>=4.7", "peft>=0.18", "transformers>=5.17", "trl>=1.16"],
    "test": [
        "accelerate>=1.10.1",
        "datasets>=4.7",
        "megatron-core>=0.16",
        "peft>=0.18",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "scikit-learn>=1.5",
        "shtab>=1.7",
        "tensorboard>=2.18",
        "transformers>=5.17",
        "trl>=1.16",
    ],
    "dev": [
        "mutmut==3.8.1",
        "ruff==0.17.5",
        "mypy==2.4.1",
        "mkdocs==1.6.1",
        "mkdocs-material==9.8.1",
        "onnx>=1.23",
        "onnxruntime>=1.32",
        "onnxscript>=0.7",
    ],
}

setup(
    name="gpp_plugin",
    version=read_version(),
    description="Trains unmodified multi-branch models as a graph of pipeline stages under DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="gpp_plugin maintainers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pipeline parallelism", "deepspeed", "pytorch", "multi-modal", "distributed training"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["gpp_plugin", "gpp_plugin.*"]),
        *find_packages("benchmarks"),
        "gpp_plugin.patches",
    ],
    package_dir={
        "gpp_benchmarks": "benchmarks/gpp_benchmarks",
        "gpp_plugin.patches": "patches",  # in a checkout beside the package, in a wheel inside it
    },
    package_data={
        "gpp_plugin": [
            "py.typed",
            "clusters/*.json",
            "engine/*.json",
            "models/*.json",
            "report/page/*",
            "config/*.toml",
        ],
        "gpp_benchmarks": ["py.typed", "scripts/cases.json", "zoo/models.json"],
        "gpp_plugin.patches": ["README.md", "*/*.patch"],
    },
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19",
        "networkx>=3.2",
        "numpy>=1.26",
        "pydantic>=2.7",
        "rich>=13",
        "safetensors>=0.4.5",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["gpp=gpp_plugin.cli:main"],
        "deepspeed.initialize": [
            "graph_pipeline=gpp_plugin.integrations.deepspeed.dispatch:initialize_block"
        ],
    },
)
