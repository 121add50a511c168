"""`python -m sp_lightning` is `sp-lightning`."""

import sys

from sp_lightning.cli import main

sys.exit(main())
