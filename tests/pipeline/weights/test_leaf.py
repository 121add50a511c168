"""The leaf of a twin: an ordinary Parameter in all that users can tell, but for one count."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from sp_lightning.pipeline.weights.leaf import CAN_COMPILE_SUBCLASSES, TwinParameter


def writes_to_data(leaf: TwinParameter) -> int:
    """The count, as weight.py reads it."""
    return leaf.earlier_writes + (0 if leaf.alias is None else leaf.alias._version)


@pytest.fixture
def leaf() -> TwinParameter:
    return TwinParameter(torch.ones(4, 4))


def test_writes_to_any_alias_are_counted(leaf: TwinParameter) -> None:
    """Whatever is written to any alias, and nothing else."""
    assert leaf.alias is None
    first, second = leaf.data, leaf.data
    assert (first + second).sum() == 32
    assert writes_to_data(leaf) == 0
    second.mul_(2)
    first[0].zero_()
    leaf.data.view(-1)[3:4].fill_(7)
    assert writes_to_data(leaf) == 3
    assert leaf._version == 0
    with torch.no_grad():
        leaf.mul_(2)
    assert writes_to_data(leaf) == 3
    assert leaf.alias is not None


def test_given_other_memory(leaf: TwinParameter) -> None:
    """What was counted before still is, and the old memory is released."""
    leaf.data.mul_(2)
    given = torch.zeros(4, 4)
    leaf.data = given
    assert leaf.data_ptr() == given.data_ptr()
    assert leaf.alias is None
    assert writes_to_data(leaf) == 1
    leaf.data.add_(1)
    assert given.sum() == 16
    assert writes_to_data(leaf) == 2
    with torch.no_grad():
        leaf.set_(torch.ones(2))
    assert leaf.data.shape == (2,)


def test_inference_mode(leaf: TwinParameter) -> None:
    """Aliases are ordinary tensors there as well, as those of Parameters are."""
    with torch.inference_mode():
        assert not leaf.data.is_inference()
        leaf.data.add_(1)
    assert writes_to_data(leaf) == 1


def test_torch_treats_it_like_any_parameter(leaf: TwinParameter) -> None:
    """No operation takes a detour."""
    assert isinstance(leaf, nn.Parameter)
    assert not has_torch_function((leaf,))
    assert type(leaf * 1) is Tensor
    module = nn.Module()
    module.weight = leaf
    assert list(module.parameters()) == [leaf]


def test_copies_do_not_count_for_it(leaf: TwinParameter) -> None:
    copied = copy.deepcopy(leaf)
    copied.data.add_(1)
    assert writes_to_data(leaf) == 0
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is nn.Parameter


@pytest.mark.skipif(not CAN_COMPILE_SUBCLASSES, reason="such leaves are not used in compiled models then")
def test_compiled_code_counts_as_well(leaf: TwinParameter) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def clamped(weight: nn.Parameter) -> Tensor:
        weight.data.clamp_(0, 0.5)
        return weight * 2

    assert clamped(leaf).sum() == 16
    assert leaf._version > 0
