"""Executes rank programs: stage modules, transport, executor. It never chooses an order."""
