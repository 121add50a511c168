"""What Lightning's own tests, run with the strategy in place of its default one, have found: one test for each fix.

Of Lightning 2.6.5's tests, those that still fail look for `SingleDeviceStrategy` in a profile, put a mock in place of
`TorchCheckpointIO.save_checkpoint` or `clip_grad_norm_`, which we do not call, or replace layers by Transformer
Engine's, which we refuse.
"""

from __future__ import annotations

from unittest import mock

import pytest
from lightning.pytorch.strategies import Strategy

from sp_lightning import SuperpipelineStrategy

from .lightning_modules import Base, assert_plain, fit, streamed, trainer


@pytest.mark.parametrize("hook", ["setup", "loss"], ids=["before the pipeline", "with the pipeline"])
def test_exceptions_reach_lightnings_on_exception(hook):
    error = RuntimeError("the user's")
    module = Base()
    setattr(module, hook, mock.Mock(side_effect=error))
    with (
        mock.patch.object(Strategy, "on_exception") as told,
        pytest.raises(RuntimeError, match="the user's"),
    ):
        fit(trainer(streamed()), module)
    told.assert_called_once_with(error)
    assert_plain(module)


@pytest.mark.parametrize("name", ["global_rank", "local_rank", "node_rank", "world_size"])
def test_ranks_may_be_set(name):
    """Lightning's strategy for one device lets them be set, and tests of what several processes do count on it."""
    strategy = streamed()
    setattr(strategy, name, 2)
    assert getattr(strategy, name) == 2
    assert strategy.is_distributed == (name == "world_size")


def test_backward_of_a_subclass():
    """It is all inside of the step, and sees what Lightning's own does."""

    class Counts(SuperpipelineStrategy):
        calls = 0

        def backward(self, *args, **kwargs):
            loss = super().backward(*args, **kwargs)
            assert all(parameter.grad is not None for parameter in self.lightning_module.parameters())
            self.calls += 1
            return loss

    strategy = Counts(k=2, debug=True)
    fit(trainer(strategy, max_epochs=1), Base())
    assert strategy.calls == 6
