"""One rank of `gpp bench loading`: a Llama on the meta device, loaded from safetensors; memory counted meanwhile.

python -m gpp_benchmarks._loading_ranks SETTINGS_JSON
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from gpp_benchmarks._ranks import rank_settings

LENGTH = 16
DTYPE = torch.bfloat16


def llama_config(settings: dict[str, Any]) -> transformers.LlamaConfig:
    """Return the configuration of the model; ``settings`` has hidden, layers, vocabulary."""
    hidden = settings["hidden"]
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=settings["layers"],
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=settings["vocabulary"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
    )


def meta_llama(settings: dict[str, Any]) -> torch.nn.Module:
    """Return the model in bfloat16 without a weight; everything but its last norm is frozen."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(settings)).to(DTYPE)
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    return model


def memory_mb(name: str) -> float:
    """Return a line of this process's status in MB, ``VmRSS`` now or ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return float(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """Let ``VmHWM`` begin anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Load as one rank and train a step; rank 0 reports what all ranks counted."""
    settings = rank_settings()
    import deepspeed

    from gpp_plugin.launch import emit_event
    from gpp_plugin.model import materialize

    imported_mb = memory_mb("VmRSS")
    before_load_mb: list[float] = []
    load_s: list[float] = []
    read = materialize.materialize_parameters

    def counted(*args: Any, **options: Any) -> Any:
        if not before_load_mb:
            before_load_mb.append(memory_mb("VmRSS"))
            forget_peak()
        started = time.perf_counter()
        made = read(*args, **options)
        load_s.append(time.perf_counter() - started)
        return made

    vars(materialize).update(materialize_parameters=counted)
    model = meta_llama(settings)
    batch = {"input_ids": torch.arange(LENGTH) % settings["vocabulary"]}
    batch["labels"] = batch["input_ids"]
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "graph_pipeline": {
            "stages": settings["ranks"],
            "weights": settings["weights"],
            "verify": False,
            "comm_timeout_s": settings["timeout_s"],
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, training_data=[batch] * 4)
    stage_mb = sum(p.numel() * p.element_size() for p in engine.parameters()) / 1e6
    found = {
        "stage_mb": stage_mb,
        "imported_mb": imported_mb,
        "before_load_mb": before_load_mb[0],
        "peak_mb": memory_mb("VmHWM"),
        "load_s": sum(load_s),
    }
    loss = float(engine.train_batch())
    found |= {"step_peak_mb": memory_mb("VmHWM"), "loss": loss}
    told: list[Any] = [None] * settings["ranks"]
    dist.all_gather_object(told, found)
    if os.environ["RANK"] == "0":
        emit_event(found=told)
    engine.destroy()


if __name__ == "__main__":
    main()
