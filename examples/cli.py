"""A user's own LightningCLI: the strategy is one line of YAML, or one option.

    python examples/cli.py fit --config examples/configs/finetune_lm.yaml
    python examples/cli.py fit --config examples/configs/finetune_lm.yaml --trainer.strategy.k=3
    python examples/cli.py fit --model=ImageClassifier --data=Images --trainer.strategy=superpipeline

The model and the data are named by the configuration, or on the command line by classes that this file imports.
"""

from collections.abc import Sequence

import finetune_lm  # noqa: F401  LightningCLI finds imported classes by their short names
import finetune_vision  # noqa: F401
from lightning.pytorch.cli import LightningCLI

import sp_lightning  # noqa: F401  registers the name "superpipeline"


def main(arguments: Sequence[str] | None = None) -> None:
    """Let LightningCLI build the model, the data and the Trainer."""
    options = None if arguments is None else list(arguments)
    LightningCLI(seed_everything_default=0, save_config_callback=None, args=options)


if __name__ == "__main__":
    main()
