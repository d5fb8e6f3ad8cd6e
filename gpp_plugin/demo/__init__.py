"""What `gpp demo` runs: a CLIP learns handwritten digits and their captions on a graph of stages."""
