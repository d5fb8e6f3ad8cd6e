"""DeepSpeed, Megatron and HuggingFace: the only files of the package that import those libraries."""
