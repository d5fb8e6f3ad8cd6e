"""The one definition of what stages and plans cost: time, memory, communication."""
