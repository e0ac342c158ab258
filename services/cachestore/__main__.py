import sys

from cachestore.cli import main

sys.exit(main())
