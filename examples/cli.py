"""A user's own LightningCLI: the strategy is one line of YAML, or one option.

python examples/cli.py fit --config examples/configs/finetune_lm.yaml
python examples/cli.py fit --config examples/configs/finetune_lm.yaml --trainer.strategy.k=3
python examples/cli.py fit --trainer.strategy=superpipeline --trainer.max_steps=20
"""

from finetune_lm import CausalLM, TextData
from lightning.pytorch.cli import LightningCLI

import sp_lightning  # noqa: F401  the string "superpipeline" is known once this is imported


def main() -> None:
    """Let LightningCLI build the model, the data and the Trainer."""
    LightningCLI(CausalLM, TextData, seed_everything_default=0, save_config_callback=None)


if __name__ == "__main__":
    main()
