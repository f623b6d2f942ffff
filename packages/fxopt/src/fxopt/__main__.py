"""``python -m fxopt``: the command `fxopt`."""

from fxopt.commands.main import main

if __name__ == "__main__":
    main()
