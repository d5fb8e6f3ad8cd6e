"""What blocks cost: measured on a device, derived from a device description, kept on disk.

`analytic_costs` is pure Python; the other modules import torch.
"""
