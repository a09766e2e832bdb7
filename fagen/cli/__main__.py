"""`python -m fagen.cli`."""

import sys

from fagen.cli import main

sys.exit(main())
