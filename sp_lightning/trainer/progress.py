"""Long work is shown as the Trainer shows its own: by a bar in a terminal, in lines elsewhere.

Where the Trainer's bar is switched off, nothing is seen. Work on another thread, such as that of an
`AsyncCheckpointIO`, leaves the terminal alone.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from sp_lightning.pipeline import Progress, Work
from sp_lightning.trainer import Namespace, StrategyPart

if TYPE_CHECKING:
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class TrainerProgress(Progress):
    """Begins work that shows itself as the Trainer of a strategy does."""

    def __init__(self, strategy: StrategyPart) -> None:
        self._strategy = strategy

    @override
    def begin(self, words: str, nbytes: int) -> Work:
        lightning, trainer = self._strategy.lightning, self._strategy._trainer
        bar: Any = None if trainer is None else trainer.progress_bar_callback
        is_shown = bar is not None and getattr(bar, "is_enabled", True)
        if not is_shown or threading.current_thread() is not threading.main_thread():
            return super().begin(words, nbytes)
        return _ShownWork(words, nbytes, lightning, isinstance(bar, lightning.tqdm_bar))


class CountedCopies(TorchFunctionMode):
    """A scope in which copies advance work: by them, `load_state_dict` reads a file that is mapped."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.copy_, Tensor.clone):
            self._work.advance(args[0].nbytes)
        return result


class _ShownWork(Work):
    """Work with a bar below those that are there, which goes when it is done; in lines where there can be none."""

    _bar: Tqdm | None = None

    def __init__(self, words: str, nbytes: int, lightning: Namespace, has_bars: bool) -> None:
        super().__init__(words, nbytes)
        self._lightning = lightning
        self._has_bars = has_bars and sys.stdout.isatty()  # rich's own display leaves no room for another

    @override
    def show(self, before: int, percent: int) -> None:
        if not self._has_bars:
            super().show(before, percent)
            return
        if self._bar is None:
            looks = {"leave": False, "dynamic_ncols": True, "bar_format": "{l_bar}{bar}| [{elapsed}<{remaining}]"}
            self._bar = self._lightning.tqdm(desc=self.words, total=100, initial=before, file=sys.stdout, **looks)
        self._bar.update(percent - self._bar.n)

    @override
    def say(self, line: str) -> None:
        self._lightning.info(line)

    @override
    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
