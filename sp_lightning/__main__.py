"""`python -m sp_lightning` runs `sp-lightning`."""

import sys

from sp_lightning.cli import main

sys.exit(main())
