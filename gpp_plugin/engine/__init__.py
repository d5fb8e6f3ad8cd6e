"""`train_batch` and what it holds; no framework inside."""
