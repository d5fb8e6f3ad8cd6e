"""What a capture keeps whole: modules that run as they are, custom autograd functions, losses on lists of dicts."""
