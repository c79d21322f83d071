"""`python -m server` is `dalsegno`."""

from server.cli import main

main()
