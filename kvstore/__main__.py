"""`python -m tiffin.kvstore node ...`: the store's commands where no `tiffin` is installed."""

from .cli import main

if __name__ == "__main__":
    main(installed=False)
