"""Weight versions: as many as planned, each with the weights of its time, gradients at the parameters."""

import pytest
import torch
from torch import nn

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.weight_versions import WeightVersions


def update(versions, parameter):
    """Add one to every weight in place, as an optimizer does."""
    versions.begin_update()
    with torch.no_grad():
        parameter += 1.0
    versions.end_update()


def test_a_backward_sees_the_weights_of_its_forward():
    weight = nn.Parameter(torch.zeros(2, 2))
    home = weight.data_ptr()
    versions = WeightVersions([weight], most=3)
    x = torch.ones(1, 2)
    outputs = {}
    for micro_batch in range(6):
        leaf = versions.use(micro_batch)[0]
        # a view of the weight is kept for the gradient of x W^T W
        outputs[micro_batch] = ((x @ leaf.t() @ leaf).sum(), leaf.detach().clone())
        if micro_batch >= 2:
            loss, seen = outputs.pop(micro_batch - 2)
            loss.backward()
            expected = seen.clone().requires_grad_(True)
            (x @ expected.t() @ expected).sum().backward()
            versions.release(micro_batch - 2)
            assert weight.grad is not None and torch.equal(weight.grad, expected.grad)
            assert torch.equal(seen, torch.full((2, 2), float(max(0, micro_batch - 4))))
            update(versions, weight)
            weight.grad = None
    assert (versions.most_held, versions.staleness) == (3, 2)
    for micro_batch in (4, 5):
        outputs[micro_batch][0].backward()
        versions.release(micro_batch)
        update(versions, weight)
    versions.settle()
    assert weight.data_ptr() == home and torch.equal(weight, torch.full((2, 2), 6.0))


def test_a_stage_that_holds_one_micro_batch_stashes_nothing():
    weight = nn.Parameter(torch.zeros(3))
    home = weight.data_ptr()
    versions = WeightVersions([weight], most=1)
    for micro_batch in range(3):
        (versions.use(micro_batch)[0] * 2).sum().backward()
        versions.release(micro_batch)
        update(versions, weight)
        assert weight.data_ptr() == home
    assert versions.most_held == 1


def test_vertical_sync_uses_weights_of_one_age():
    weight = nn.Parameter(torch.zeros(1))
    versions = WeightVersions([weight], most=3, lag=2)
    seen = []
    for micro_batch in range(6):
        leaf = versions.use(micro_batch)[0]
        seen.append(float(leaf.detach()))
        leaf.sum().backward()
        versions.release(micro_batch)
        update(versions, weight)
    assert seen == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]
    assert (versions.most_held, versions.staleness) == (3, 2)


def test_more_versions_than_planned_are_refused():
    weight = nn.Parameter(torch.zeros(1))
    versions = WeightVersions([weight], most=1)
    versions.use(0)
    with pytest.raises(RuntimeFailure, match="2 sets of weights"):
        versions.begin_update()


def test_frozen_parameters_have_no_versions():
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    versions = WeightVersions([frozen], most=1)
    assert versions.use(0)[0] is frozen


def test_a_failed_update_leaves_the_weights_at_home():
    weight = nn.Parameter(torch.zeros(2))
    home = weight.data_ptr()
    versions = WeightVersions([weight], most=2)
    versions.use(0)
    versions.begin_update()
    assert weight.data_ptr() != home
    with torch.no_grad():
        weight += 1.0
    versions.forget()
    assert weight.data_ptr() == home and torch.equal(weight, torch.ones(2))
