"""Long work is shown as the Trainer shows its own: by its kind of progress bar, if it has one.

Where the bar is switched off, nothing is seen; where there is no terminal, as in a notebook or the log of a job, each
tenth is a line. Work on another thread, such as that of an `AsyncCheckpointIO`, leaves the terminal alone.
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
    from lightning.pytorch.callbacks import RichProgressBar
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress
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
        if sys.stdout.isatty() and isinstance(bar, lightning.rich_bar):
            return _WorkInRich(words, nbytes, bar)
        if sys.stdout.isatty() and isinstance(bar, lightning.tqdm_bar):
            return _WorkInTqdm(words, nbytes, lightning)
        return _WorkInLines(words, nbytes, lightning)


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


class _WorkInLines(Work):
    """Work that is seen where Lightning's own messages are."""

    def __init__(self, words: str, nbytes: int, lightning: Namespace) -> None:
        super().__init__(words, nbytes)
        self._lightning = lightning

    @override
    def say(self, line: str) -> None:
        self._lightning.info(line)


class _WorkInTqdm(_WorkInLines):
    """Work with a bar below those that are there, which goes when it is done."""

    _bar: Tqdm | None = None

    @override
    def show(self, before: int, percent: int) -> None:
        if self._bar is None:
            looks = {"leave": False, "dynamic_ncols": True, "bar_format": "{l_bar}{bar}| [{elapsed}<{remaining}]"}
            self._bar = self._lightning.tqdm(desc=self.words, total=100, initial=before, file=sys.stdout, **looks)
        self._bar.update(percent - self._bar.n)

    @override
    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _WorkInRich(Work):
    """Work with a bar among the Trainer's own: a terminal has one display of them."""

    _display: CustomProgress | None = None
    _is_opened = False  # whether the display was opened for this bar

    def __init__(self, words: str, nbytes: int, bar: RichProgressBar) -> None:
        super().__init__(words, nbytes)
        self._bar = bar

    @override
    def show(self, before: int, percent: int) -> None:
        if self._display is None:
            self._is_opened = self._bar.progress is None or not self._bar.progress.live.is_started
            if self._is_opened:
                self._bar._init_progress(self._bar.trainer)
            self._display = self._bar.progress
            assert self._display is not None
            self._task = self._display.add_task(self.words, total=100, completed=before)
        self._display.update(self._task, completed=percent)
        self._display.refresh()

    @override
    def close(self) -> None:
        if self._display is not None:
            # not removed: Lightning finds its own by their places
            self._display.update(self._task, visible=False)
            if self._is_opened:
                self._bar._stop_progress()
