"""`python -m holdfast` is the command line, as `holdfast` is."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
