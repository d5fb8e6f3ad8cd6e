"""Where weights come from, and whose stage holds them."""
