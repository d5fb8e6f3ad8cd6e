"""What has no gradient travels as the bits of floats: exact for every value of every type."""

import pytest
import torch

from gpp_plugin.integrations.deepspeed.stock_engine import bits_length, from_bits, to_bits
from gpp_plugin.ir.tensors import TensorSpec, batch_layout

VALUES = {
    "int64": torch.tensor([[0, -100], [2**24 + 1, -(2**62) - 3]]),
    "int32": torch.tensor([2**31 - 1, -1], dtype=torch.int32),
    "uint8": torch.tensor([[0, 1, 255]], dtype=torch.uint8),
    "bool": torch.tensor([[True], [False], [True]]),
    "float64": torch.tensor([1e300, float("nan")], dtype=torch.float64),
    "float32": torch.tensor(3.25),
    "bfloat16": torch.tensor([[1.5, float("-inf")]], dtype=torch.bfloat16),
    "float16": torch.zeros(2, 0, dtype=torch.float16),
}


@pytest.mark.parametrize("payload", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_value_arrives(payload):
    specs = [
        TensorSpec(name=name, dtype=name, shape=tuple(t.shape), num_samples=1, layout=batch_layout())
        for name, t in VALUES.items()
    ]
    packed = torch.cat([to_bits(tensor, payload) for tensor in VALUES.values()])
    assert packed.dtype == payload
    assert packed.numel() == sum(bits_length(spec, payload) for spec in specs)
    first = 0
    for spec, tensor in zip(specs, VALUES.values(), strict=True):
        count = bits_length(spec, payload)
        found = from_bits(packed[first : first + count], spec)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(tensor))
        first += count
