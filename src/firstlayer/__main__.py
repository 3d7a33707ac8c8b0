"""Run the command line: ``python -m firstlayer``."""

from .cli import main

if __name__ == "__main__":
    main()
