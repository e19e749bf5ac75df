"""`python -m safari` is the command `safari`."""

from safari.cli import main

if __name__ == "__main__":
    main()
