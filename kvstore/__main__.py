"""`python -m tiffin.kvstore node ...`: the store's commands without an installed `tiffin`."""

from .cli import main

if __name__ == "__main__":
    main(installed=False)
