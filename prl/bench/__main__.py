import sys

from prl.bench import main

sys.exit(main())
