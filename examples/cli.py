"""A user's own LightningCLI: the strategy is one line of YAML, or one option.

    python examples/cli.py fit --config examples/configs/finetune_lm.yaml
    python examples/cli.py fit --config examples/configs/finetune_lm.yaml --trainer.strategy.k=3
    python examples/cli.py fit --model=ImageClassifier --data=Images --trainer.strategy=superpipeline

Which model and which data is said by the configuration, or by the name of a class that this file imports.
"""

from collections.abc import Sequence

import finetune_lm  # noqa: F401  classes that are imported are found by their short names
import finetune_vision  # noqa: F401
from lightning.pytorch.cli import LightningCLI

import sp_lightning  # noqa: F401  the string "superpipeline" is known once this is imported


def main(arguments: Sequence[str] | None = None) -> None:
    """Let LightningCLI build the model, the data and the Trainer."""
    options = None if arguments is None else list(arguments)
    LightningCLI(seed_everything_default=0, save_config_callback=None, args=options)


if __name__ == "__main__":
    main()
