import sys

from prl.plan import main

sys.exit(main())
