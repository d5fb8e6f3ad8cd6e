"""What blocks cost: measured on a device, derived from a device description, kept on disk.

`analytic_costs` and `cost_store` are pure Python; the other modules import torch.
"""
