"""What blocks cost: measured on a device, derived from a device description, kept on disk.

`analytic` and `store` are pure Python; the other modules import torch.
"""
