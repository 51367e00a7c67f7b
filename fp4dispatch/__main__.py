"""``python -m fp4dispatch``."""

from fp4dispatch.cli import main

raise SystemExit(main())
