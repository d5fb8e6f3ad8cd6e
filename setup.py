"""Package metadata of gpp_plugin; tool settings are in pyproject.toml, pinned versions in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

EXTRAS = {
    "hf": ["transformers>=5.0", "tokenizers>=0.22"],
    "megatron": ["megatron-core>=0.16"],
    "report": ["tensorboard>=2.18"],
    "demo": ["transformers>=5.0", "scikit-learn>=1.5"],
    "test": [
        "megatron-core>=0.16",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "scikit-learn>=1.5",
        "tensorboard>=2.18",
        "transformers>=5.0",
    ],
    "dev": ["ruff==0.17.5", "mypy==2.4.1"],
}

setup(
    name="gpp_plugin",
    version="0.1.0",
    description="Trains unmodified multi-branch models as a graph of pipeline stages under DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["gpp_plugin", "gpp_plugin.*"]),
        "gpp_benchmarks",
        "gpp_plugin.patches",
    ],
    package_dir={
        "gpp_benchmarks": "benchmarks/gpp_benchmarks",
        "gpp_plugin.patches": "patches",  # in a checkout beside the package, in a wheel inside it
    },
    package_data={
        "gpp_plugin": ["py.typed", "clusters/*.json", "models/*.json"],
        "gpp_benchmarks": ["py.typed"],
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
        "deepspeed.initialize": ["graph_pipeline=gpp_plugin.integrations.deepspeed:initialize_block"],
    },
)
