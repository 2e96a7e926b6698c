"""``python -m jmoe`` is the command line."""

from jmoe.cli import main

main()
