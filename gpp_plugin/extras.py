"""What brings a module that gpp_plugin works without: ``pip install gpp_plugin[...]``."""

from __future__ import annotations

EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "accelerate": "trainer",
    "sklearn": "demo",
    "megatron": "megatron",
    "tensorboard": "report",
    "matplotlib": "plots",
}


def needs_extra(error: ModuleNotFoundError) -> str | None:
    """Return what is needed and how to install it, None where no extra brings the module.

    >>> needs_extra(ModuleNotFoundError(name="transformers.trainer"))
    "needs transformers, which is not installed: pip install 'gpp_plugin[hf]'"
    """
    missing = (error.name or "").partition(".")[0]
    if missing not in EXTRAS:
        return None
    return f"needs {missing}, which is not installed: pip install 'gpp_plugin[{EXTRAS[missing]}]'"
