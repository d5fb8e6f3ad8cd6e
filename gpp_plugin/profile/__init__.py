"""What blocks cost: measured on a device, derived from a device description, kept on disk.

`analytic` and `store` are pure Python; `measure`, `nodes` and `share` import torch.
"""
